"""Labels for tensor dimensions: which grid axis may split which dimension of a layer's output."""

from __future__ import annotations

from math import prod

SPACE = "dhw"
DEFAULT = {1: ".", 2: "nc", 3: "ncw", 4: "nchw", 5: "ncdhw"}

Shape = tuple[int, ...]


def default_dims(shape: Shape) -> str:
    """Labels by position: samples, channels, then space; "." beyond five dimensions."""
    if len(shape) in DEFAULT:
        return DEFAULT[len(shape)]
    return ("nc" + "." * len(shape))[: len(shape)]


def inherited_dims(shape: Shape, inputs: list[tuple[Shape, str]]) -> str:
    """The labels of the operand that has most, among those with as many dimensions."""
    same_rank = [dims for _, dims in inputs if len(dims) == len(shape)]
    if not same_rank:
        return default_dims(shape)
    return max(same_rank, key=lambda dims: len(dims.replace(".", "")))


def each_once(dims: str, shape: Shape) -> str:
    """The same labels, none of them twice; labels by position where their number is wrong."""
    if len(dims) != len(shape):
        dims = default_dims(shape)
    return "".join("." if label in dims[:i] else label for i, label in enumerate(dims))


def view_dims(source: tuple[Shape, str], shape: Shape) -> str:
    """The labels after a reshape: each goes to the first dimension of what it was spread over.

    What is behind that first one is space again, where rows of attention become rows and columns.

    >>> view_dims(((1, 35, 8), "nhc"), (1, 5, 7, 8))
    'nhwc'
    """
    labels, behind = ["."] * len(shape), []
    for in_dims, out_dims in view_groups(source[0], shape):
        can_be_cut = [d for d in in_dims if source[0][d] > 1]
        known = [source[1][d] for d in can_be_cut or in_dims if source[1][d] != "."]
        lead = next((d for d in out_dims if shape[d] > 1), out_dims[0] if out_dims else None)
        if lead is not None and known:
            labels[lead] = known[0]
            behind += [(known[0], d) for d in out_dims if d > lead]
    for label, dim in behind:
        following = SPACE[SPACE.index(label) + 1 :] if label in SPACE else ""
        labels[dim] = next((each for each in following if each not in labels), ".")
    return "".join(labels)


def view_groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Pairs of runs of dimensions that hold the same elements before and after a reshape.

    >>> view_groups((2, 3, 4), (2, 12))
    [([0], [0]), ([1, 2], [1])]
    """
    if 0 in source or 0 in target:
        return [([*range(len(source))], [*range(len(target))])]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        first_in, first_out = i, j
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while (a := prod(source[first_in:i])) != (b := prod(target[first_out:j])):
            longer = (a < b and i < len(source)) or j == len(target)  # the run before the reshape
            i, j = i + longer, j + (not longer)
        groups.append(([*range(first_in, i)], [*range(first_out, j)]))
    return groups
