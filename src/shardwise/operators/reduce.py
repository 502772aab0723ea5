"""Reductions over whole dimensions: each rank's part, and the parts added up."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from shardwise.geometry.grid import AXES
from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request
from shardwise.operators.splits import LABEL_AXES, Split
from shardwise.operators.strategy import Inputs, Local, Need, Strategy, operator


@dataclass(frozen=True)
class DimAttrs:
    """What operators along one dimension say."""

    dim: int


@dataclass(frozen=True)
class ReduceAttrs:
    kind: str  # mean, sum, amax or amin
    dims: tuple[int, ...]
    keepdim: bool
    labels: str  # of the operand's dimensions
    dtype: torch.dtype | None = None  # that is added in, where the model says so


def reduction(
    call: Call,
    kind: str,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None = None,
) -> Request:
    labels = call.model.labels_of(call.x)
    return Request("reduce", (call.x,), ReduceAttrs(kind, dims, keepdim, labels, dtype))


@operator("reduce", "mean", "sum", "amax", "amin")
class Reduce(Strategy):
    """Mean, sum, max and min over dimensions.

    Sums and means may be split over the dimensions they reduce: every rank sums its part, and the
    parts are added into channels that are split over those ranks as well, or on the first of them.
    """

    keeps_inputs, draws = False, False

    def read(self, call: Call) -> Request | None:
        num_dims, dims = len(call.shape()), call.get("dim")
        dims = (dims,) if isinstance(dims, int) else dims
        dims = tuple(sorted(d % num_dims for d in dims)) if dims else tuple(range(num_dims))
        dtype = call.args.get("dtype")  # amax and amin have none
        return reduction(call, call.name, dims, call.get("keepdim", False), dtype)

    def keeps(self, layer: Layer[ReduceAttrs]) -> bool:
        return layer.attrs.kind in ("amax", "amin")

    def labels(self, attrs: ReduceAttrs, shape: Shape, inputs: Inputs) -> str:
        gone = "." if attrs.keepdim else ""
        labels = enumerate(attrs.labels)
        return "".join(gone if dim in attrs.dims else label for dim, label in labels) or "."

    def axes(self, layer: Layer[ReduceAttrs]) -> dict[str, int]:
        return super().axes(layer) | self._summed(layer)

    def _summed(self, layer: Layer[ReduceAttrs]) -> dict[str, int]:
        """Axes of reduced dimensions, over which partial sums can be made."""
        if layer.attrs.kind not in ("mean", "sum"):
            return {}
        shape, labels = layer.operands[0].shape, layer.attrs.labels
        return {axis: shape[dim] for dim in layer.attrs.dims for axis in LABEL_AXES[labels[dim]]}

    def _input_ranges(self, split: Split[ReduceAttrs]) -> list[Ranges]:
        layer = split.layer
        reduced, summed = layer.attrs.dims, self._summed(layer)
        ranges, out_dim = [], 0
        for dim, size in enumerate(layer.operands[0].shape):
            axes = LABEL_AXES[layer.attrs.labels[dim]]
            if dim in reduced:
                ranges.append(split.ranges(size, *(axis for axis in axes if axis in summed)))
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
        summed = [axis for axis in AXES if axis in self._summed(split.layer)]
        shape, dims = split.layer.shape, split.layer.dims
        if "c" in dims:
            parts = split.ranges(shape[dims.index("c")], *LABEL_AXES["c"], *summed)
            return Layout.of(shape, split.but(dims.index("c"), parts))
        first = np.all([split.coordinates[axis] == 0 for axis in summed], axis=0)
        return Layout.of(shape, [found * first[:, None] for found in split.all_ranges()])

    def run(self, local: Local[ReduceAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,), a = tensors, local.attrs
        if not x.numel() and 0 not in local.layer.operands[0].shape:  # a part of nothing
            return x.sum(dtype=local.layer.dtype).expand(local.output.shape)
        if a.kind in ("amax", "amin"):
            y = getattr(x, a.kind)(a.dims, a.keepdim)
        elif a.kind == "sum":
            y = x.sum(a.dims, a.keepdim, dtype=a.dtype)
        else:
            y = x.mean(a.dims, a.keepdim, dtype=a.dtype)
            held = prod(x.shape[d] for d in a.dims)
            total = prod(local.layer.operands[0].shape[d] for d in a.dims)
            y = y if held == total else y * (held / total)
        return y.reshape(local.output.shape)

    def flops(self, split: Split) -> np.ndarray:
        return self.needs(split)[0].layout.numels.astype(float)
