"""Operators that look up or write at given places: a dimension with places is whole, others cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from shardwise.operators.calls import Call, Request
from shardwise.operators.follow import Follow, Follows, Read, all_of, follow, same
from shardwise.operators.strategy import operator


def _gathered(call: Call) -> Request | None:
    """Each place reads along one dimension of x, which has at least as many of all others."""
    x, index = call.pick("self", "index")
    rank = len(call.result)
    if len(call.shape(x)) != rank or 0 in call.shape(index):  # no places may have any shape
        return None
    dim = call["dim"] % rank
    read = tuple(None if d == dim else d for d in range(rank))
    return follow(call, [(index, tuple(range(rank))), (x, read)])


def _selected(call: Call) -> Request | None:
    x, index = call.pick("self", "index")
    rank = len(call.shape(x))
    dim = call["dim"] % rank
    read = tuple(None if d == dim else d for d in range(rank))
    return follow(call, [(x, read), (index, (dim,))], call.model.labels_of(x))


def _scattered(call: Call) -> Request | None:
    """Each place writes along one dimension; others are cut where there are places everywhere."""
    x, index = call.pick("self", "index")
    shape, places = call.shape(x), call.shape(index)
    dim = call["dim"] % len(shape)
    cut = [d != dim and shape[d] == places[d] for d in range(len(shape))]
    role: Follows = tuple(d if is_cut else None for d, is_cut in enumerate(cut))
    written = call.args.get("src")
    roles = [(x, role), (index, role), (written if isinstance(written, fx.Node) else None, role)]
    return follow(call, roles, call.model.labels_of(x))


def _added(source: str, call: Call) -> Request | None:
    """Slices are written along one dimension."""
    x, index, written = call["self"], call["index"], call.args.get(source)
    rank = len(call.shape(x))
    dim = call["dim"] % rank
    role: Follows = tuple(None if d == dim else d for d in range(rank))
    roles = [(x, role), (index, all_of(call, index))]
    if isinstance(written, fx.Node):
        shape = call.shape(written)
        roles.append((written, role if len(shape) == rank else all_of(call, written)))
    return follow(call, roles, call.model.labels_of(x))


# -- x[places, ...] --------------------------------------------------------------------------------


def _places(call: Call) -> tuple[list[Any], int, int] | None:
    """For every dimension of x its places, or None; where what they find stands, and its rank."""
    x = call.shape()
    given = [*call["indices"], *[None] * (len(x) - len(call["indices"]))]
    used = [dim for dim, places in enumerate(given) if places is not None]
    values = [given[dim].meta["val"] for dim in used]
    if not used or any(v.dtype in (torch.bool, torch.uint8) for v in values):  # masks
        return None
    adjacent = used == [*range(used[0], used[-1] + 1)]
    return given, used[0] if adjacent else 0, max(value.ndim for value in values)


def _indexed(call: Call) -> Request | None:
    """Places are broadcast against each other; what they find stands where they stood, or first."""
    found = _places(call)
    if found is None:
        return None
    given, start, rank = found
    left = [dim for dim, places in enumerate(given) if places is None]
    others = [*range(start), *range(start + rank, start + rank + len(left) - start)]
    x: Follows = tuple(others[left.index(d)] if d in left else None for d in range(len(given)))
    roles = [(call["self"], x)]
    for places in given:
        if places is not None:
            roles.append((places, _broadcast(call, places, start, rank)))
    return follow(call, roles)


def _broadcast(call: Call, places: Any, start: int, rank: int) -> Follows:
    """What a tensor of places is to the result, of which `rank` dimensions are theirs."""
    if places.meta["val"].ndim == 0:
        return (None,)
    shape = call.shape(places)
    first = start + rank - len(shape)
    pairs = enumerate(shape, first)
    return tuple(dim if size == call.result[dim] else None for dim, size in pairs)


def _put(call: Call) -> Request | None:
    """What is written is broadcast against what these places would find."""
    found = _places(call)
    if found is None:
        return _masked(call)
    given, start, rank = found
    left = [dim for dim, places in enumerate(given) if places is None]
    x: Follows = tuple(dim if dim in left else None for dim in range(len(given)))
    total = rank + len(left)
    to: list[int | None] = [None] * total
    for position, dim in enumerate(left):
        to[position if position < start else position + rank] = dim
    values = call["values"]
    shape = call.shape(values)
    ends = to[total - len(shape) :] if values.meta["val"].ndim else [None]
    if len(ends) != len(shape):
        return None
    pairs = zip(shape, ends, strict=True)
    written = tuple(d if d is not None and size == call.result[d] else None for size, d in pairs)
    roles = [(call["self"], x), (values, written)]
    roles += [(places, all_of(call, places)) for places in given if places is not None]
    return follow(call, roles, call.model.labels_of(call["self"]))


def _masked(call: Call) -> Request | None:
    """A mask stands for dimensions of x; what is written is the same wherever it is true."""
    x, values = call.pick("self", "values")
    used = [(dim, mask) for dim, mask in enumerate(call["indices"]) if mask is not None]
    if len(used) != 1 or used[0][1].meta["val"].dtype is not torch.bool:
        return None
    start, mask = used[0]
    rank, stop = len(call.shape(x)), start + mask.meta["val"].ndim
    places: Follows = tuple(range(start, stop)) or (None,)
    if values.meta["val"].ndim > rank - stop:  # other numbers at every place
        return None
    roles = [(x, tuple(range(rank))), (mask, places)]
    roles.append((values, same(call, values) if values.meta["val"].ndim else (None,)))
    return follow(call, roles, call.model.labels_of(x))


# -- tables ----------------------------------------------------------------------------------------


def _embedded(call: Call) -> Request | None:
    """Rows of a table: places may be split, and features."""
    weight, index = call.pick("weight", "indices")
    if call["scale_grad_by_freq"] or call["sparse"]:
        return None
    rank = len(call.result)
    places = tuple(range(rank - 1)) or (None,)
    request = follow(call, [(index, places), (weight, (None, rank - 1))])
    names = {1: "c", 2: "nc", 3: "nwc", 4: "nhwc", 5: "ndhwc"}  # features are channels
    dims = names.get(rank, "n" + "." * (rank - 2) + "c")
    return request if request is None else replace(request, dims=dims)


PICKS: dict[str, Read] = {
    "gather": _gathered,
    "index_select": _selected,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scattered),
    **dict.fromkeys(("index_add", "index_copy"), partial(_added, "source")),
    "index_fill": partial(_added, "value"),
    "index": _indexed,
    "index_put": _put,
    "embedding": _embedded,
}


@operator("pick", *PICKS)
class Pick(Follow):
    """Lookups in whole lines; lines may be split, and places."""

    table = PICKS
