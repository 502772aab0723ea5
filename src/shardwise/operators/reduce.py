"""Reductions over whole dimensions, and operators that need a dimension whole."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from shardwise.geometry.grid import SPACE
from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request
from shardwise.operators.splits import LABEL_AXES, Split
from shardwise.operators.strategy import Inputs, Local, Need, Strategy, narrow, operator


@dataclass(frozen=True)
class ReduceAttrs:
    kind: str  # mean, sum, amax or amin
    dims: tuple[int, ...]
    keepdim: bool
    labels: str  # of the operand's dimensions


def reduction(call: Call, kind: str, dims: tuple[int, ...], keepdim: bool) -> Request:
    labels = call.model.labels_of(call.x)
    return Request("reduce", (call.x,), ReduceAttrs(kind, dims, keepdim, labels))


@operator("reduce", "mean", "sum", "amax", "amin")
class Reduce(Strategy):
    """Mean, sum, max and min over dimensions.

    Sums and means may be split over the spatial dimensions they reduce: every rank sums its part,
    and the parts are added into channels split over those ranks as well.
    """

    keeps_inputs, draws = False, False

    def read(self, call: Call) -> Request | None:
        if call.args.get("dtype") is not None:  # amax and amin have none
            return None
        num_dims, dims = len(call.shape()), call.get("dim")
        dims = (dims,) if isinstance(dims, int) else dims
        dims = tuple(sorted(d % num_dims for d in dims)) if dims else tuple(range(num_dims))
        return reduction(call, call.name, dims, call.get("keepdim", False))

    def labels(self, attrs: ReduceAttrs, shape: Shape, inputs: Inputs) -> str:
        gone = "." if attrs.keepdim else ""
        labels = enumerate(attrs.labels)
        return "".join(gone if dim in attrs.dims else label for dim, label in labels) or "."

    def axes(self, layer: Layer[ReduceAttrs]) -> dict[str, int]:
        return super().axes(layer) | self._summed(layer)

    def _summed(self, layer: Layer[ReduceAttrs]) -> dict[str, int]:
        """Spatial axes of reduced dimensions, over which partial sums can be made."""
        if layer.attrs.kind not in ("mean", "sum") or "c" not in layer.dims:
            return {}
        labels = layer.attrs.labels
        return {
            labels[dim]: layer.operands[0].shape[dim]
            for dim in layer.attrs.dims
            if labels[dim] in SPACE
        }

    def _input_ranges(self, split: Split[ReduceAttrs]) -> list[Ranges]:
        layer = split.layer
        reduced, summed = layer.attrs.dims, self._summed(layer)
        ranges, out_dim = [], 0
        for dim, size in enumerate(layer.operands[0].shape):
            label = layer.attrs.labels[dim]
            if dim in reduced:
                ranges.append(split.ranges(size, label) if label in summed else split.whole(size))
                out_dim += layer.attrs.keepdim
            else:
                ranges.append(split.dim_ranges(out_dim))
                out_dim += 1
        return ranges

    def needs(self, split: Split) -> tuple[Need, ...]:
        return (Need(Layout.of(split.layer.operands[0].shape, self._input_ranges(split))),)

    def partial(self, split: Split) -> Layout | None:
        if not any(split.degree(axis) > 1 for axis in self._summed(split.layer)):
            return None
        return super().output(split)

    def output(self, split: Split) -> Layout:
        if self.partial(split) is None:
            return super().output(split)
        shape, dim = split.layer.shape, split.layer.dims.index("c")
        axes = LABEL_AXES["c"] + tuple(a for a in SPACE if a in self._summed(split.layer))
        return Layout.of(shape, split.but(dim, split.ranges(shape[dim], *axes)))

    def run(self, local: Local[ReduceAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,) = tensors
        kind, dims, keepdim = local.attrs.kind, local.attrs.dims, local.attrs.keepdim
        if kind in ("amax", "amin"):
            y = getattr(x, kind)(dims, keepdim)
        else:
            held = prod(x.shape[d] for d in dims)
            y = x.mean(dims, keepdim) if kind == "mean" else x.sum(dims, keepdim)
            total = prod(local.layer.operands[0].shape[d] for d in dims)
            y = y * (held / total) if kind == "mean" and held != total else y
        return y.reshape(local.output.shape)

    def flops(self, split: Split) -> np.ndarray:
        return self.needs(split)[0].layout.numels.astype(float)


@dataclass(frozen=True)
class DimAttrs:
    """What operators along one dimension say."""

    dim: int


@operator("whole_dim", "cumsum")
class WholeDim(Strategy):
    """One dimension is needed whole, then cut to the block."""

    keeps_inputs, draws = False, False
    as_called = True

    def read(self, call: Call) -> Request:
        return Request(self.op, (call.x,), DimAttrs(call["dim"] % len(call.shape())))

    def needs(self, split: Split[DimAttrs]) -> tuple[Need, ...]:
        shape, dim = split.layer.shape, split.layer.attrs.dim
        return (Need(Layout.of(shape, split.but(dim, split.whole(shape[dim])))),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return narrow(local.layer.call(tensors), local.needs[0], local.output)

    def flops(self, split: Split) -> np.ndarray:
        return 4.0 * self.needs(split)[0].layout.numels


@operator("softmax", "softmax", "log_softmax")
class Softmax(WholeDim):
    """Exponentials over a sum of them."""
