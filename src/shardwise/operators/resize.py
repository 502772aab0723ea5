"""Resizing images and volumes, to the nearest pixels or linearly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional

from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, Strategy, operator

# Torch's modes, by the number of dimensions.
STOCK_MODES = {"nearest": ("nearest",) * 3, "linear": ("linear", "bilinear", "trilinear")}
NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")


@dataclass(frozen=True)
class InterpolateAttrs:
    mode: str  # nearest or linear
    scales: tuple[float, ...] | None
    align_corners: bool | None


@operator("interpolate", *NEAREST, *LINEAR)
class Interpolate(Strategy):
    """Each output position reads one or two neighbours per dimension."""

    keeps_inputs, draws = False, False

    def read(self, call: Call) -> Request:
        linear = call.name in LINEAR
        attrs = InterpolateAttrs(
            mode="linear" if linear else "nearest",
            scales=tuple(call["scale_factors"]) if call["scale_factors"] else None,
            align_corners=call["align_corners"] if linear else None,
        )
        return Request("interpolate", (call["input"],), attrs)

    def needs(self, split: Split) -> tuple[Need, ...]:
        shape = split.layer.operands[0].shape
        ranges = [split.dim_ranges(0), split.dim_ranges(1)]
        for dim in range(2, len(shape)):
            if split.dim_degree(dim) == 1:
                ranges.append(split.whole(shape[dim]))
                continue
            low, high, _ = neighbours(split.layer, dim)
            cut = split.dim_ranges(dim)
            filled = cut[:, 1] > cut[:, 0]
            first = low[np.where(filled, cut[:, 0], 0)]
            last = high[np.where(filled, cut[:, 1] - 1, 0)]
            ranges.append(np.stack([first, last + 1], axis=1) * filled[:, None])
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,) = tensors
        if not any(local.is_split[2:]):
            return self._stock(local, x)
        for dim in range(2, x.ndim):
            x = self._along(local, x, dim)
        return x

    @staticmethod
    def _stock(local: Local[InterpolateAttrs], x: torch.Tensor) -> torch.Tensor:
        scales, corners = local.attrs.scales, local.attrs.align_corners
        size = None if scales else local.layer.shape[2:]
        mode = STOCK_MODES[local.attrs.mode][x.ndim - 3]
        return functional.interpolate(x, size, scales, mode, align_corners=corners)

    @staticmethod
    def _along(local: Local[InterpolateAttrs], x: torch.Tensor, dim: int) -> torch.Tensor:
        """One dimension: the two neighbours, weighted."""
        low, high, weight = neighbours(local.layer, dim)
        cut = slice(local.output.starts[dim], local.output.stops[dim])
        origin = local.needs[0].starts[dim]

        def pick(index: np.ndarray) -> torch.Tensor:
            return x.index_select(dim, torch.from_numpy(index[cut] - origin).to(x.device))

        if local.attrs.mode == "nearest":
            return pick(low)
        shape = [-1 if d == dim else 1 for d in range(x.ndim)]
        w = torch.from_numpy(weight[cut]).to(x).view(shape)
        return pick(low) * (1 - w) + pick(high) * w


def neighbours(
    layer: Layer[InterpolateAttrs], dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every output index: the lower and upper neighbour and the upper one's weight."""
    attrs = layer.attrs
    size, outputs = layer.operands[0].shape[dim], layer.shape[dim]
    index = np.arange(outputs, dtype=np.float64)
    scale = size / outputs
    given = attrs.scales[dim - 2] if attrs.scales else None
    if given:
        scale = 1.0 / given
    if attrs.mode == "nearest":
        low = _nearest(size, outputs, given, layer.dtype)
        return low, low, np.zeros(outputs)
    if attrs.align_corners:
        position = index * ((size - 1) / (outputs - 1) if outputs > 1 else 0.0)
    else:
        position = np.maximum((index + 0.5) * scale - 0.5, 0.0)
    low = np.minimum(position.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    return low, high, position - low


@lru_cache(maxsize=256)
def _nearest(size: int, outputs: int, scale: float | None, dtype: torch.dtype) -> np.ndarray:
    """The row that torch picks for every output: its rounding depends on the type of numbers."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.arange(size, dtype=exact).view(1, 1, -1)
    wanted = None if scale else outputs
    return functional.interpolate(rows, wanted, scale, "nearest").flatten().long().numpy()
