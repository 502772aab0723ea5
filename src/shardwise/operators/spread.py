"""How far numbers spread, over dimensions: norms of vectors, variances, standard deviations.

Where dimensions that are reduced are split, ranks add up what is theirs of each group, and each
hands out its part of the results, where a sum would have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

import numpy as np
import torch
from torch import Tensor

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request
from shardwise.operators.norm_over_ranks import Grouping, precise, statistics
from shardwise.operators.reduce import Reduce, ReduceAttrs, reduction
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Inputs, Local, Need, Strategy, operator

NORMS = ("linalg_vector_norm", "norm", "linalg_norm", "linalg_matrix_norm")
SPREADS = ("var", "std", "var_mean", "std_mean")


@dataclass(frozen=True)
class SpreadAttrs(ReduceAttrs):
    """`kind` says whether parts can be added ("sum"), or dimensions are needed whole ("amax")."""

    statistic: str = "norm"  # or var, or std
    order: float = 2.0  # of a norm; of the others, what is taken away from the number of elements


def _dims(call: Call) -> tuple[int, ...] | None:
    """The dimensions that are reduced; None where torch has rules of its own."""
    num_dims, dims = len(call.shape()), call.get("dim")
    if dims is None:
        return tuple(range(num_dims))
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(dim % num_dims for dim in dims)) or None


def _order(call: Call, dims: tuple[int, ...]) -> float | None:
    """The p of a norm of vectors; None for norms of matrices that are none of vectors."""
    order = call.args.get("ord", call.args.get("p"))
    of_vectors = call.name in NORMS[:2] or (call.name == "linalg_norm" and len(dims) == 1)
    if order is None or (order == "fro" and not of_vectors):
        return 2.0
    return float(order) if of_vectors and not isinstance(order, str) else None


def _adds(statistic: str, order: float, count: int) -> bool:
    """Whether the statistic of a group follows from sums over its parts."""
    return 1.0 <= order < inf if statistic == "norm" else order < count


def _correction(call: Call) -> float:
    given = call.args.get("correction", call.args.get("unbiased"))
    return 1.0 if given is None else float(given)


SUM = Reduce()  # whose parts lie where those of a statistic do


@operator("spread", *NORMS, *SPREADS)
class Spread(Strategy):
    """Norms of vectors, variances and standard deviations over dimensions."""

    keeps_inputs, draws = True, False

    def read(self, call: Call) -> Request | None:
        value, dims = call.x.meta["val"], _dims(call)
        if dims is None or not value.is_floating_point() or call.args.get("dtype") is not None:
            return None
        keepdim = call.get("keepdim", False)
        if call.item == 1:
            return reduction(call, "mean", dims, keepdim)
        statistic = "norm" if call.name in NORMS else call.name[:3]
        order = _order(call, dims) if statistic == "norm" else _correction(call)
        if order is None:
            return None
        count = prod(call.shape()[dim] for dim in dims)
        kind = "sum" if _adds(statistic, order, count) else "amax"
        how = ReduceAttrs(kind, dims, keepdim, call.model.labels_of(call.x))
        attrs = SpreadAttrs(**vars(how), statistic=statistic, order=order)
        return Request("spread", (call.x,), attrs)

    def labels(self, attrs: SpreadAttrs, shape: Shape, inputs: Inputs) -> str:
        return SUM.labels(attrs, shape, inputs)

    def axes(self, layer: Layer[SpreadAttrs]) -> dict[str, int]:
        return SUM.axes(layer)

    def needs(self, split: Split[SpreadAttrs]) -> tuple[Need, ...]:
        return SUM.needs(split)

    def output(self, split: Split[SpreadAttrs]) -> Layout:
        return SUM.output(split)

    def num_sums(self, layer: Layer[SpreadAttrs]) -> int:
        return 2 if layer.attrs.statistic != "norm" and layer.dtype is torch.float64 else 1

    def sums(self, split: Split[SpreadAttrs]) -> Layout | None:
        groups = SUM.partial(split)
        if groups is None:
            return None
        each = 1 if split.layer.attrs.statistic == "norm" else 2
        ranges = [split.whole(each), *np.moveaxis(groups.bounds, 1, 0)]
        return Layout.of((each, *groups.shape), ranges)

    def run(self, local: Local[SpreadAttrs], tensors: list[Tensor]) -> Tensor:
        (x,), attrs = tensors, local.attrs
        if local.sums is not None:
            return SpreadOverRanks.apply(x, local).to(local.layer.dtype)  # type: ignore[union-attr]
        if attrs.statistic == "norm":
            y = torch.linalg.vector_norm(x, attrs.order, attrs.dims, attrs.keepdim)
        else:
            spread = torch.var if attrs.statistic == "var" else torch.std
            y = spread(x, attrs.dims, correction=attrs.order, keepdim=attrs.keepdim)
        return y.reshape(local.output.shape)

    def flops(self, split: Split) -> np.ndarray:
        return 4.0 * SUM.flops(split)


class SpreadOverRanks(torch.autograd.Function):
    """The same for groups that span ranks; a rank hands out its part of the results."""

    @staticmethod
    def forward(ctx, x, local):  # type: ignore[no-untyped-def]
        attrs, count = local.attrs, _count(local)
        grouping, middle = _grouping(x, local), None
        if attrs.statistic == "norm":
            found = local.sum(_powers(x, attrs, grouping))[0].pow(1.0 / attrs.order)
        else:
            middle, found = statistics(x, grouping, count, local.sum)
            found = found * (count / (count - attrs.order))
            found = found.sqrt() if attrs.statistic == "std" else found
        ctx.save_for_backward(x, middle, found)
        ctx.local, ctx.grouping = local, grouping
        return found.reshape(local.sums.shape[1:])[_own_part(local)].reshape(local.output.shape)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, middle, found = ctx.saved_tensors
        local, grouping = ctx.local, ctx.grouping
        wanted = dy.new_zeros(local.sums.shape, dtype=torch.float64)
        if dy.numel():
            wanted[0][_own_part(local)] = dy.double()
        wanted = local.sum(wanted.reshape(grouping.sums))[0]
        if x.numel() == 0:
            return torch.empty_like(x), None
        slope = wanted * _slopes(found, local)
        values = x.to(precise(x.dtype))
        values = _powered(values, local.attrs.order) if middle is None else values
        away = values if middle is None else values - grouping.expand(middle).to(values.dtype)
        return (away * grouping.expand(slope).to(values.dtype)).to(x.dtype), None


def _count(local: Local[SpreadAttrs]) -> int:
    """How many elements a group has on all ranks."""
    return prod(local.layer.operands[0].shape[dim] for dim in local.attrs.dims)


def _grouping(x: Tensor, local: Local[SpreadAttrs]) -> Grouping:
    assert local.sums is not None
    each, *groups = local.sums.shape
    lead = 1 if 0 in local.attrs.dims else groups[0]
    return Grouping(local.attrs.dims, tuple(x.shape), (each, lead, prod(groups) // lead))


def _own_part(local: Local[SpreadAttrs]) -> tuple[slice, ...]:
    """This rank's part of the results of its groups."""
    assert local.sums is not None
    groups = Box(local.sums.starts[1:], local.sums.stops[1:])
    nothing = (slice(0),) * len(groups.shape)
    return nothing if local.output.empty else local.output.slices_in(groups)


def _powers(x: Tensor, attrs: SpreadAttrs, grouping: Grouping) -> Tensor:
    """The sum of powers of this rank's elements, for each group."""
    if x.numel() == 0:
        return grouping.nothing(x)
    norms = torch.linalg.vector_norm(x, attrs.order, attrs.dims, True, dtype=torch.float64)
    return norms.pow(attrs.order).reshape(grouping.sums)


def _powered(x: Tensor, order: float) -> Tensor:
    """How the sum of powers changes with each element, but for a factor."""
    return x if order == 2.0 else x.sgn() * x.abs().pow(order - 1.0)


def _slopes(found: Tensor, local: Local[SpreadAttrs]) -> Tensor:
    """How a statistic changes with what `_powered` says, or with the distance from the mean.

    Where all elements are the same there is no slope: torch says nought, too.
    """
    attrs = local.attrs
    if attrs.statistic == "norm":
        return found.pow(1.0 - attrs.order).masked_fill(found == 0.0, 0.0)
    slope = torch.full_like(found, 2.0 / (_count(local) - attrs.order))
    return (
        slope if attrs.statistic == "var" else (slope / 2.0 / found).masked_fill(found == 0.0, 0.0)
    )
