"""Windows laid out side by side, and summed up again: unfold and fold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import each_once
from shardwise.operators.calls import Call, Request, Requests, of_samples
from shardwise.operators.reduce import DimAttrs
from shardwise.operators.shape import Moves
from shardwise.operators.splits import Split, rows, window
from shardwise.operators.strategy import Local, Need, Strategy, narrow, operator

# Images are [N, C, H, W], windows [N, C * R * S, L]: L goes through rows of windows.

Pair = tuple[int, int]


@dataclass(frozen=True)
class PatchAttrs:
    kernel: Pair
    dilation: Pair
    padding: Pair
    stride: Pair

    def reach(self, dim: int) -> int:
        """From the first to the last row, or column, of a window."""
        return self.dilation[dim] * (self.kernel[dim] - 1)

    def count(self, size: int, dim: int) -> int:
        """The number of windows in so many rows, or columns."""
        return (size + 2 * self.padding[dim] - self.reach(dim) - 1) // self.stride[dim] + 1

    @property
    def numel(self) -> int:
        return self.kernel[0] * self.kernel[1]


def patches_of(call: Call) -> PatchAttrs:
    names = ("kernel_size", "dilation", "padding", "stride")
    pairs = [tuple(call[name]) * (2 if len(call[name]) == 1 else 1) for name in names]
    return PatchAttrs(*pairs)


@operator("unfold", "im2col")
class Unfold(Moves):
    """A block of windows needs the rows that they reach, padding included."""

    reads_beyond = True

    def read(self, call: Call) -> Request | Requests:
        return of_samples(call, Request("unfold", (call.x,), patches_of(call), dims="nch"), 2)

    def needs(self, split: Split[PatchAttrs]) -> tuple[Need, ...]:
        shape, a = split.layer.operands[0].shape, split.layer.attrs
        samples, channels, windows = split.all_ranges()
        height = split.whole(shape[2])
        if split.dim_degree(2) > 1:
            down = rows(windows, a.count(shape[3], 1))
            height = window(down, a.kernel[0], a.stride[0], a.padding[0], a.dilation[0])
        ranges = [samples, rows(channels, a.numel), height, split.whole(shape[3])]
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local[PatchAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        a, out, (x,) = local.attrs, local.output, tensors
        across = a.count(local.layer.operands[0].shape[3], 1)
        split = local.is_split[2]
        padding = (0 if split else a.padding[0], a.padding[1])
        y = functional.unfold(x, a.kernel, a.dilation, padding, a.stride)
        channel = local.needs[0].starts[1] * a.numel
        position = out.starts[2] // across * across if split else 0
        starts = (out.starts[0], channel, position)
        stops = tuple(start + size for start, size in zip(starts, y.shape, strict=True))
        return narrow(y, Box(starts, stops), out)


@dataclass(frozen=True)
class FoldAttrs(PatchAttrs):
    across: int  # windows in a row of them


@operator("fold", "col2im")
class Fold(Strategy):
    """A block of the image needs all rows of windows that reach into it."""

    keeps_inputs, draws = False, False

    def read(self, call: Call) -> Request | Requests:
        a = patches_of(call)
        attrs = FoldAttrs(**vars(a), across=a.count(call["output_size"][1], 1))
        return of_samples(call, Request("fold", (call.x,), attrs, dims="nchw"), 1)

    def needs(self, split: Split[FoldAttrs]) -> tuple[Need, ...]:
        a, shape = split.layer.attrs, split.layer.operands[0].shape
        samples, channels, height, _ = split.all_ranges()
        filled = (self.output(split).numels > 0)[:, None]
        windows = _reaching(height, a) * a.across
        ranges = [samples, channels * a.numel, np.clip(windows, 0, shape[2]) * filled]
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local[FoldAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        a, out, held, (x,) = local.attrs, local.output, local.needs[0], tensors
        if held.empty:  # no window reaches here
            return x.sum().expand(out.shape)
        first, last = held.starts[2] // a.across, held.stops[2] // a.across - 1
        top = first * a.stride[0] - a.padding[0]
        width = local.layer.shape[3]
        size = ((last - first) * a.stride[0] + a.reach(0) + 1, width)
        y = functional.fold(x, size, a.kernel, a.dilation, (0, a.padding[1]), a.stride)
        sides = -out.starts[3], out.stops[3] - width
        ends = top - out.starts[2], out.stops[2] - (top + size[0])
        return functional.pad(y, (*sides, *ends))

    def flops(self, split: Split) -> np.ndarray:
        return self.needs(split)[0].layout.numels.astype(float)


def _reaching(height: Ranges, a: PatchAttrs) -> Ranges:
    """The rows of windows that reach into these rows of an image."""
    starts = -((-height[:, 0] - a.padding[0] + a.reach(0)) // a.stride[0])
    stops = (height[:, 1] - 1 + a.padding[0]) // a.stride[0] + 1
    return np.stack([np.maximum(starts, 0), np.maximum(stops, 0)], axis=1)


@dataclass(frozen=True)
class WindowsAttrs(DimAttrs):
    size: int
    step: int


@operator("windows", "unfold")
class SlidingWindows(Moves):
    """Windows along one dimension, each laid out in a new one."""

    free = True

    def read(self, call: Call) -> Request | None:
        if call.x.meta["val"].ndim == 0:
            return None
        attrs = WindowsAttrs(call["dimension"] % len(call.shape()), *call.pick("size", "step"))
        labels = each_once(call.model.labels_of(call.x) + ".", call.result)
        return Request("windows", (call.x,), attrs, dims=labels)

    def needs(self, split: Split[WindowsAttrs]) -> tuple[Need, ...]:
        a = split.layer.attrs
        ranges = split.but(a.dim, window(split.dim_ranges(a.dim), a.size, a.step, 0))[:-1]
        return (Need(Layout.of(split.layer.operands[0].shape, ranges)),)

    def run(self, local: Local[WindowsAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        a = local.attrs
        return tensors[0].unfold(a.dim, a.size, a.step)
