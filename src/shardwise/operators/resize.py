"""Resizing images and volumes: to the nearest pixels, linearly or cubically.

Which pixels an output reads and with which weights torch itself is asked, with its own rounding:
resizing goes dimension by dimension, so that a few combs of ones show all weights of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np
import torch

from shardwise.geometry.layout import Layout
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request, as_called
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, Strategy, operator

NEAREST = {f"upsample_nearest{n}d": "nearest" for n in (1, 2, 3)}
EXACT = {f"_upsample_nearest_exact{n}d": "nearest-exact" for n in (1, 2, 3)}
LINEAR = {"upsample_linear1d": "linear", "upsample_bilinear2d": "linear"}
LINEAR |= {"upsample_trilinear3d": "linear", "upsample_bicubic2d": "bicubic"}
SMOOTH = {"_upsample_bilinear2d_aa": "bilinear", "_upsample_bicubic2d_aa": "bicubic"}
MODES = NEAREST | EXACT | LINEAR | SMOOTH
REACH = {"linear": 1, "bilinear": 1, "bicubic": 2}  # pixels to either side
SCALES = ("scales_d", "scales_h", "scales_w", "scales")


@dataclass(frozen=True)
class InterpolateAttrs:
    scales: tuple[float | None, ...]  # of every dimension of space, where they are given
    align_corners: bool


class Line(NamedTuple):
    """How one dimension is resized: the question that torch is asked."""

    name: str  # of the ATen operator
    num_dims: int  # of space
    size: int
    outputs: int
    scale: float | None
    align_corners: bool
    dtype: torch.dtype

    @property
    def mode(self) -> str:
        return MODES[self.name]


@operator("interpolate", *MODES)
class Interpolate(Strategy):
    """Each output position reads a few neighbours per dimension."""

    keeps_inputs, draws = False, False
    as_called = True

    def read(self, call: Call) -> Request | None:
        x = call.x.meta["val"]
        given = call.args.get("scale_factors")
        if "scale_factors" not in call.args:
            given = [call[name] for name in SCALES if name in call.args]
        attrs = InterpolateAttrs(
            scales=tuple(given or (None,) * (x.ndim - 2)),
            align_corners=bool(call.args.get("align_corners")),
        )
        if not self._is_regular(call, attrs, x.dtype):
            return None
        return replace(as_called("interpolate", call), attrs=attrs)

    @staticmethod
    def _is_regular(call: Call, attrs: InterpolateAttrs, dtype: torch.dtype) -> bool:
        """Whether torch has one arithmetic for all dimensions, and for both directions."""
        shape, made = call.shape(), call.result
        if MODES[call.name] in REACH and not dtype.is_floating_point:
            return False
        if call.name in SMOOTH and 1 in (*shape[2:], *made[2:]):
            return False  # one row or column is spread over all (torch 2.13)
        dims = range(2, len(shape))
        asked = (_question(call.name, attrs, shape, made, dim, dtype) for dim in dims)
        return all(map(goes_back, asked))

    def needs(self, split: Split[InterpolateAttrs]) -> tuple[Need, ...]:
        shape = split.layer.operands[0].shape
        ranges = [split.dim_ranges(0), split.dim_ranges(1)]
        for dim in range(2, len(shape)):
            if split.dim_degree(dim) == 1:
                ranges.append(split.whole(shape[dim]))
                continue
            first, last = neighbours(_line(split.layer, dim)).reach
            cut = split.dim_ranges(dim)
            filled = cut[:, 1] > cut[:, 0]
            start = first[np.where(filled, cut[:, 0], 0)]
            stop = last[np.where(filled, cut[:, 1] - 1, 0)] + 1
            ranges.append(np.stack([start, stop], axis=1) * filled[:, None])
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,) = tensors
        if not any(local.is_split[2:]):
            return local.layer.call(tensors)
        y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # as torch does
        for dim in range(2, x.ndim):
            y = self._resized(local, y, dim)
        return y.to(x.dtype)

    @staticmethod
    def _resized(local: Local[InterpolateAttrs], x: torch.Tensor, dim: int) -> torch.Tensor:
        """One dimension: the neighbours, weighted."""
        found = neighbours(_line(local.layer, dim))
        own = slice(local.output.starts[dim], local.output.stops[dim])
        origin, last = local.needs[0].starts[dim], x.shape[dim] - 1
        weighted = MODES[local.layer.traits.called or ""] in REACH
        parts = []
        for index, weight in zip(found.index.T, found.weight.T, strict=True):
            places = np.clip(index[own] - origin, 0, last)  # those without a weight lie anywhere
            part = x.index_select(dim, torch.from_numpy(places).to(x.device))
            if weighted:
                shape = [-1 if d == dim else 1 for d in range(x.ndim)]
                part = part * torch.from_numpy(weight[own]).to(x).view(shape)
            parts.append(part)
        return sum(parts[1:], parts[0])

    def flops(self, split: Split[InterpolateAttrs]) -> np.ndarray:
        taps = 2.0 * REACH.get(MODES[split.layer.traits.called or ""], 0.5)
        return self.output(split).numels * taps ** (len(split.layer.shape) - 2)


def _line(layer: Layer[InterpolateAttrs], dim: int) -> Line:
    assert layer.traits.called is not None
    shape = layer.operands[0].shape
    return _question(layer.traits.called, layer.attrs, shape, layer.shape, dim, layer.dtype)


def _question(
    name: str, attrs: InterpolateAttrs, shape: Shape, made: Shape, dim: int, dtype: torch.dtype
) -> Line:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    scale = attrs.scales[dim - 2]
    return Line(name, len(shape) - 2, shape[dim], made[dim], scale, attrs.align_corners, exact)


@dataclass(frozen=True)
class Neighbours:
    """What every output reads: pixels [outputs, taps], their weights, and the first and last."""

    index: np.ndarray
    weight: np.ndarray
    reach: tuple[np.ndarray, np.ndarray]


@lru_cache(maxsize=256)
def neighbours(line: Line) -> Neighbours:
    """The pixels that outputs read, and their weights, as torch finds them."""
    if line.mode not in REACH:
        pixels = torch.arange(line.size, dtype=line.dtype)[None]
        index = _asked(line, pixels).long().numpy().T
        return Neighbours(index, np.ones(index.shape), (index[:, 0], index[:, 0]))
    low, count = _window(line)
    comb = np.arange(line.size) % count == np.arange(count)[:, None]
    found = _asked(line, torch.from_numpy(comb).to(line.dtype)).numpy()
    index = low[:, None] + np.arange(count)
    weight = np.take_along_axis(found.T, index % count, axis=1)
    weight = np.where((index >= 0) & (index < line.size), weight, 0)
    used = np.flatnonzero((weight != 0).any(axis=0))
    taps = slice(used[0], used[-1] + 1) if len(used) else slice(0, 1)
    index, weight = index[:, taps], weight[:, taps]
    first = np.where(weight != 0, index, line.size - 1).min(axis=1)
    last = np.where(weight != 0, index, 0).max(axis=1)
    reach = np.minimum.accumulate(first[::-1])[::-1], np.maximum.accumulate(last)
    return Neighbours(index, weight, reach)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def goes_back(line: Line) -> bool:
    """Whether torch gives gradients to those pixels that were read; not for some given scales."""
    found = neighbours(line)
    with torch.enable_grad():
        pixels = torch.zeros(3, line.size, dtype=line.dtype, requires_grad=True)
        y = _asked(line, pixels)
        errors = torch.linspace(1, 2, y.numel(), dtype=line.dtype).view_as(y)
        (got,) = torch.autograd.grad(y, pixels, errors)
    expected = torch.zeros_like(got)
    for index, weight in zip(found.index.T, found.weight.T, strict=True):
        places = torch.from_numpy(np.clip(index, 0, line.size - 1))
        expected.index_add_(1, places, errors * torch.from_numpy(weight).to(errors))
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


def _window(line: Line) -> tuple[np.ndarray, int]:
    """Where a window begins that surely holds the pixels of each output, and its size."""
    scale = 1 / line.scale if line.scale else line.size / line.outputs
    position = (np.arange(line.outputs) + 0.5) * scale - 0.5
    if line.align_corners:
        scale = (line.size - 1) / max(line.outputs - 1, 1)
        position = np.arange(line.outputs) * scale
    reach = ceil(REACH[line.mode] * (max(scale, 1.0) if line.name in SMOOTH else 1.0)) + 1
    middle = np.clip(np.floor(position), -1, line.size)
    return middle.astype(np.int64) - reach, 2 * reach + 2


def _asked(line: Line, rows: torch.Tensor) -> torch.Tensor:
    """What torch makes of some rows of pixels, as a line, an image or a volume; [rows, outputs]."""
    resize = getattr(torch.ops.aten, line.name).default
    height = [(len(rows), len(rows), None)] * (line.num_dims > 1)  # it stays, as depth does
    depth = [(1, 1, None)] * (line.num_dims > 2)
    sizes, outputs, scales = zip(
        *depth, *height, (line.size, line.outputs, line.scale), strict=True
    )
    lead = (1, len(rows)) if line.num_dims == 1 else (1, 1)
    corners = (line.align_corners,) if line.mode in REACH else ()
    y = resize(rows.reshape(*lead, *sizes), list(outputs), *corners, *scales)
    return y.reshape(len(rows), line.outputs)
