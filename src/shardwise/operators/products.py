"""Products of tensors: matrices, batches of them, and whatever torch.einsum can write.

Every dimension of the result may be split, and so may dimensions that are summed over: each rank
then has a partial sum, and these are added into channels that are split over those ranks as well. A
dimension of space that the product sums over stays split as it was; of all others the longest is
split by axis c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from shardwise.geometry.grid import SPACE
from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request, tensor_arguments
from shardwise.operators.notation import (
    NUMBERED,
    ByLetters,
    Notation,
    behind,
    einsum_notation,
    extents,
    labels_of,
)
from shardwise.operators.pointwise import as_called
from shardwise.operators.splits import LABEL_AXES, Split
from shardwise.operators.strategy import Function, Local, Need, operator

# -- how each call is written ----------------------------------------------------------------------

FIXED = {
    "mm": "ik,kj->ij",
    "bmm": "bik,bkj->bij",
    "mv": "ik,k->i",
    "outer": "i,j->ij",
    "ger": "i,j->ij",
    "addmm": "ij,ik,kj->ij",
    "addmv": "i,ik,k->i",
    "addr": "ij,i,j->ij",
    "addbmm": "ij,bik,bkj->ij",
    "baddbmm": "bij,bik,bkj->bij",
}
ADDEND = {name: 0 for name in FIXED if "add" in name} | {"bilinear": 3}  # is added, not multiplied


def _matmul(call: Call, a: Shape, b: Shape) -> Notation:
    """Matrices and vectors, with batches of them in front."""
    batch = NUMBERED[: max(len(a), len(b), 2) - 2]
    row, column = "i" * (len(a) > 1), "j" * (len(b) > 1)
    first = behind(batch, max(0, len(a) - 2)) + row + "k"
    second = behind(batch, max(0, len(b) - 2)) + "k" + column
    return Notation((first, second), batch + row + column)


def _einsum(call: Call, *shapes: Shape) -> Notation | None:
    return einsum_notation(call["equation"], shapes)


def _tensordot(call: Call, a: Shape, b: Shape) -> Notation:
    first, second = list("abcdefghijklm"[: len(a)]), list("nopqrstuvwxyz"[: len(b)])
    for dim, other in zip(call["dims_self"], call["dims_other"], strict=True):
        second[other % len(b)] = first[dim % len(a)].upper()
        first[dim % len(a)] = first[dim % len(a)].upper()
    result = [letter for letter in first + second if letter.islower()]
    return Notation(("".join(first), "".join(second)), "".join(result))


def _inner(call: Call, a: Shape, b: Shape) -> Notation | None:
    if not a or not b:  # a number times a tensor
        return None
    first, second = "abcdefghijklm"[: len(a) - 1], "nopqrstuvwxyz"[: len(b) - 1]
    return Notation((f"{first}Z", f"{second}Z"), first + second)


def _bilinear(call: Call, a: Shape, *others: Shape) -> Notation:
    batch = NUMBERED[: len(a) - 1]
    terms = (f"{batch}i", f"{batch}j", "oij", "o")
    return Notation(terms[: 1 + len(others)], f"{batch}o")


def _chain(call: Call, *shapes: Shape) -> Notation:
    """One matrix after the other; the first and the last may be vectors."""
    terms = ["".join(pair) for pair in pairwise("abcdefghijklmnopqrstuvwxyz"[: len(shapes) + 1])]
    row = terms[0][: len(shapes[0]) - 1]
    column = terms[-1][1:] if len(shapes[-1]) > 1 else ""
    terms[0], terms[-1] = row + terms[0][1:], terms[-1][:1] + column
    return Notation(tuple(terms), row + column)


def _vecdot(call: Call, a: Shape, b: Shape) -> Notation:
    letters = NUMBERED[: max(len(a), len(b))]
    terms = behind(letters, len(a)), behind(letters, len(b))
    return Notation(terms, letters.replace(letters[call["dim"]], ""))


READINGS: dict[str, Callable[..., Notation | None]] = {
    "matmul": _matmul,
    "linalg_matmul": _matmul,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "inner": _inner,
    "bilinear": _bilinear,
    "linalg_multi_dot": _chain,
    "chain_matmul": _chain,
    "linalg_vecdot": _vecdot,
}


def _notation(call: Call, shapes: Sequence[Shape]) -> Notation | None:
    if call.name not in FIXED:
        return READINGS[call.name](call, *shapes)
    known = Notation.of(FIXED[call.name])
    pairs = zip(known.terms, shapes, strict=True)
    return replace(known, terms=tuple(behind(term, len(shape)) for term, shape in pairs))


# -- which axis splits what ------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductAttrs(Notation):
    summed: tuple[tuple[str, str], ...]  # axes, and which letter that is summed over each splits
    addend: int | None  # which operand is added to the product


def _described(call: Call, tensors: Sequence[Any]) -> tuple[ProductAttrs, str] | None:
    """What a product keeps of its call, and the labels of its result."""
    shapes = [call.shape(tensor) if tensor.meta["val"].ndim else () for tensor in tensors]
    notation = _notation(call, shapes)
    if notation is None or not notation.result:  # one number comes of it
        return None
    addend, known = ADDEND.get(call.name), labels_of(call, tensors)
    if addend is not None and addend < len(known):
        known[addend] = ""
    sizes = notation.sizes(shapes)
    labels = _labels(notation, shapes, known)
    dims = "".join(labels.get(letter, ".") for letter in notation.result)
    summed = _summed(notation, sizes, known, dims) if "c" in dims else {}
    attrs = ProductAttrs(notation.terms, notation.result, tuple(summed.items()), addend)
    return attrs, dims


def _labels(notation: Notation, shapes: Sequence[Shape], known: Sequence[str]) -> dict[str, str]:
    """The labels of the result's letters: as operands have them, and what is spare for the others.

    Columns of weights are channels, or whatever is summed over; so are heads that have no label.
    """
    labels, sizes = notation.labels(shapes, known), notation.sizes(shapes)
    pairs = list(zip(notation.terms, known, strict=True))
    dims = [dim for term, own in pairs for dim in zip(term, own, strict=False)]
    gone = [label for letter, label in dims if letter in notation.gone]
    spare = [x for x in dict.fromkeys(("c", *gone)) if x not in (".", "n", *labels.values())]
    free = [letter for letter in notation.result if letter not in labels and sizes[letter] > 1]
    of_weights = [letter for letter in free[::-1] if letter not in dict(dims)]
    others = sorted((x for x in free if x not in of_weights), key=lambda x: (x, ".") not in dims)
    labels |= zip(of_weights, spare, strict=False)
    return labels if "c" in labels.values() else labels | dict(zip(others, "c", strict=False))


def _summed(
    notation: Notation, sizes: dict[str, int], known: Sequence[str], dims: str
) -> dict[str, str]:
    """The axes that split letters which are gone: of space its own, and c for the longest other."""
    found: dict[str, str] = {}
    for letter in sorted(notation.gone, key=lambda letter: -sizes[letter]):
        pairs = zip(notation.terms, known, strict=True)
        labels = [own[term.index(letter)] for term, own in pairs if own and letter in term]
        space = [label for label in labels if label in SPACE and label not in (*dims, *found)]
        if sizes[letter] > 1:
            found.setdefault(space[0] if space else "c", letter)
    return found


@operator("product", *FIXED, *READINGS)
class Product(ByLetters):
    """A sum of products, over the letters that its result has not."""

    keeps_inputs, draws = True, False
    as_called = True
    joint_channels = False

    def read(self, call: Call) -> Request | None:
        tensors = tensor_arguments(call.node)
        found = _described(call, tensors)
        if found is None:
            return None
        request = as_called("product", call)
        return replace(request, tensors=tuple(tensors), attrs=found[0], dims=found[1])

    def makes_new_tensor(self, layer: Layer[ProductAttrs]) -> bool:
        return len(layer.attrs.terms) > 1  # else it may be a view

    def axes(self, layer: Layer[ProductAttrs]) -> dict[str, int]:
        own = {axis: size for axis, size in super().axes(layer).items() if axis != "c"}
        sizes = layer.attrs.sizes([operand.shape for operand in layer.operands])
        return own | {axis: sizes[letter] for axis, letter in layer.attrs.summed}

    def result_ranges(self, split: Split[ProductAttrs], dim: int) -> Ranges:
        if split.layer.dims[dim] != "c":
            return split.dim_ranges(dim)
        return split.ranges(split.layer.shape[dim], "f")

    def ranges(self, split: Split[ProductAttrs], letter: str, size: int) -> Ranges:
        axes = [axis for axis, summed in split.layer.attrs.summed if summed == letter]
        return (
            split.ranges(size, *axes) if axes and size > 1 else super().ranges(split, letter, size)
        )

    def needs(self, split: Split[ProductAttrs]) -> tuple[Need, ...]:
        """Of ranks whose partial sums are added only the first adds what is added to them."""
        needs, addend = list(super().needs(split)), split.layer.attrs.addend
        if addend is not None and addend < len(needs):
            axes = [axis for axis, _ in split.layer.attrs.summed]
            first = np.all([split.coordinates[axis] == 0 for axis in axes], axis=0)
            layout = needs[addend].layout
            bounds = layout.bounds * np.reshape(first, (-1, 1, 1))
            needs[addend] = Need(Layout(layout.shape, bounds))
        return tuple(needs)

    def partial(self, split: Split[ProductAttrs]) -> Layout | None:
        if all(split.degree(axis) == 1 for axis, _ in split.layer.attrs.summed):
            return None
        dims = range(len(split.layer.shape))
        return Layout.of(split.layer.shape, [self.result_ranges(split, dim) for dim in dims])

    def output(self, split: Split[ProductAttrs]) -> Layout:
        if self.partial(split) is None:
            return super().output(split)
        shape, dim = split.layer.shape, split.layer.dims.index("c")
        axes = LABEL_AXES["c"] + tuple(a for a, _ in split.layer.attrs.summed if a in SPACE)
        return Layout.of(shape, split.but(dim, split.ranges(shape[dim], *axes)))

    def run(self, local: Local[ProductAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.lower(local)(tensors)

    def lower(self, local: Local[ProductAttrs]) -> Function:
        call, addend = local.layer.caller(), local.attrs.addend
        empty = {i: _local_shape(local, i) for i, box in enumerate(local.needs) if box.empty}

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            for place, shape in empty.items():
                nothing = tensors[place].reshape(-1)[:0]  # of a scalar too, which all ranks have
                added = nothing.sum(dtype=nothing.dtype).expand(shape)
                tensors[place] = added if place == addend else nothing.reshape(shape)
            return call(tensors)

        return run if empty else call

    def flops(self, split: Split[ProductAttrs]) -> np.ndarray:
        """Two for each product of numbers, where factors are multiplied one after the other."""
        attrs, shapes = split.layer.attrs, [operand.shape for operand in split.layer.operands]
        sizes = {
            letter: extents(self.ranges(split, letter, size))
            for letter, size in attrs.sizes(shapes).items()
        }
        terms = [set(term) for place, term in enumerate(attrs.terms) if place != attrs.addend]
        total, joined = np.zeros(split.world), terms[0]
        for place, term in enumerate(terms[1:], start=2):
            joined = joined | term
            total += 2.0 * prod((sizes[letter] for letter in joined), start=1.0)
            joined = joined & set(attrs.result).union(*terms[place:])
        return total if len(terms) > 1 else prod(sizes.values(), start=1.0 * split.used)


def _local_shape(local: Local[ProductAttrs], place: int) -> list[int]:
    """The shape of an operand of which this rank has no element, as far as the result tells."""
    result, shape = local.attrs.result, local.layer.operands[place].shape
    parts = dict(zip(result, zip(local.layer.shape, local.output.shape, strict=True), strict=True))
    whole_and_part = [parts.get(letter, (0, 0)) for letter in local.attrs.terms[place]]
    pairs = zip(shape, whole_and_part, strict=False)  # a scalar has no letters
    return [part if size == whole else size for size, (whole, part) in pairs]
