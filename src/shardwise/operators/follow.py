"""Operators called as they are on parts: what they look along is whole, all else is cut alike.

For every dimension of an operand it is said which dimension of the result it is cut with; a
dimension that follows none is needed whole. What is computed whole is cut afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.graph.labels import each_once
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request, as_called
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, Strategy, narrow, operator

Follows = tuple[int | None, ...]  # for every dimension: the one of the result that it is cut with
Roles = Sequence[tuple[Any, Follows]]  # what each tensor of a call is to the result
Read = Callable[[Call], Request | None]


@dataclass(frozen=True)
class FollowAttrs:
    follows: tuple[Follows, ...]  # of every operand
    item: int | None  # which of several results


def follow(call: Call, roles: Roles, labels: str = "") -> Request | None:
    """The layer whose tensors have these roles; None where one has two, or nobody knows its role.

    Dimensions that follow none have the given labels, or none.
    """
    known: dict[Any, Follows] = {}
    for node, follows in roles:
        if node is not None and known.setdefault(node, follows) != follows:
            return None
    request = as_called("follow", call)
    if set(request.tensors) != set(known):
        return None
    names = list(labels or "." * len(call.result))
    for node, follows in known.items():
        own = call.model.labels_of(node)
        for dim, to in enumerate(follows):
            if to is not None and names[to] == ".":
                names[to] = own[dim]
    attrs = FollowAttrs(tuple(known[node] for node in request.tensors), call.item)
    return replace(request, attrs=attrs, dims=each_once("".join(names), call.result))


# -- roles -----------------------------------------------------------------------------------------


def same(call: Call, tensor: Any, whole: Iterable[int] = ()) -> Follows:
    """Of a tensor that is broadcast against the result, but for dimensions that are whole."""
    shape, result = call.shape(tensor), call.result
    lead, kept = len(result) - len(shape), set(whole)
    dims = range(len(shape))
    return tuple(
        None if d + lead in kept or shape[d] != result[d + lead] else d + lead for d in dims
    )


def all_of(call: Call, tensor: Any) -> Follows:
    """Of a tensor that is needed whole."""
    return (None,) * len(call.shape(tensor))


def as_announced(layer: Layer, result: Any, item: int | None) -> torch.Tensor:
    """One of the results of a call, which has as many dimensions as torch.export has said."""
    y = result if item is None else result[item]
    if y.ndim != (0 if layer.scalar else len(layer.shape)):
        raise ShardwiseError(
            f"layer {layer.name!r} ({layer.traits.called}) made a tensor of shape "
            f"{tuple(y.shape)} where torch.export had announced {layer.shape}"
        )
    return y if y.ndim else y.reshape(1)


@operator("follow")
class Follow(Strategy):
    """An operator of which each tensor has a role."""

    keeps_inputs, draws = True, False
    as_called = True
    table: Mapping[str, Read] = {}  # by the ATen operator

    def read(self, call: Call) -> Request | None:
        request = self.table[call.name](call)
        return None if request is None else replace(request, op=self.op)

    def needs(self, split: Split[FollowAttrs]) -> tuple[Need, ...]:
        filled = (self.output(split).numels > 0)[:, None]
        found = []
        for operand, follows in zip(split.layer.operands, split.layer.attrs.follows, strict=True):
            pairs = zip(operand.shape, follows, strict=True)
            ranges = [split.whole(s) if to is None else split.dim_ranges(to) for s, to in pairs]
            found.append(Need(Layout.of(operand.shape, [each * filled for each in ranges])))
        return tuple(found)

    def run(self, local: Local[FollowAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        result = local.layer.call(self._shaped(local, tensors))
        y = as_announced(local.layer, result, local.attrs.item)
        cut = {to for follows in local.attrs.follows for to in follows}
        own = range(len(local.layer.shape))
        starts = tuple(local.output.starts[dim] if dim in cut else 0 for dim in own)
        stops = (
            local.output.stops[d] if d in cut else size
            for d, size in zip(own, y.shape, strict=True)
        )
        return narrow(y, Box(starts, tuple(stops)), local.output)

    @staticmethod
    def _shaped(local: Local[FollowAttrs], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Boxes of nothing have no shape: operands without elements get that of their part."""
        if all(tensor.numel() for tensor in tensors):
            return tensors
        found, sizes = [], local.output.shape
        for tensor, operand, follows in zip(
            tensors, local.layer.operands, local.attrs.follows, strict=True
        ):
            pairs = zip(operand.shape, follows, strict=True)
            shape = [size if to is None else sizes[to] for size, to in pairs]
            found.append(tensor if tensor.numel() else tensor.reshape(shape))
        return found

    def flops(self, split: Split) -> np.ndarray:
        read = sum(need.layout.numels for need in self.needs(split))
        return 4.0 * np.asarray(read, dtype=float) * np.ones(split.world)
