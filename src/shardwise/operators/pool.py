"""Pooling: every output position reads a window of its input."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch.nn import functional

from shardwise.geometry.layout import Layout, Ranges
from shardwise.operators.conv import window
from shardwise.operators.strategy import Local, Need, Split, Strategy

MAX_POOL = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
AVG_POOL = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
ADAPTIVE_AVG = {
    1: functional.adaptive_avg_pool1d,
    2: functional.adaptive_avg_pool2d,
    3: functional.adaptive_avg_pool3d,
}
ADAPTIVE_MAX = {
    1: functional.adaptive_max_pool1d,
    2: functional.adaptive_max_pool2d,
    3: functional.adaptive_max_pool3d,
}


class Pool(Strategy):
    """Pooling with a fixed kernel; split space is padded by the transfer, with `fill`."""

    fill = 0.0
    keeps_inputs = True

    def needs(self, split: Split) -> tuple[Need, ...]:
        shape, attrs = split.layer.operands[0].shape, split.layer.attrs
        ranges = [split.dim_ranges(0), split.dim_ranges(1)]
        split_space = any(split.dim_degree(dim) > 1 for dim in range(2, len(shape)))
        for dim in range(len(shape) - 2):
            if split_space:
                window_of = [attrs[key][dim] for key in ("kernel", "stride", "padding", "dilation")]
                ranges.append(window(split.dim_ranges(2 + dim), *window_of))
            else:
                ranges.append(split.whole(shape[2 + dim]))
        return (Need(Layout.of(shape, ranges), self.fill),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,) = tensors
        if any(local.is_split(dim) for dim in range(2, x.ndim)):
            return self.pool_padded(local, x)
        return self.pool(local, x)

    def pool(self, local: Local, x: torch.Tensor) -> torch.Tensor:
        """All of space, with the stock operator."""
        raise NotImplementedError

    def pool_padded(self, local: Local, x: torch.Tensor) -> torch.Tensor:
        """A part of space, on an input that already holds its padding."""
        raise NotImplementedError

    def flops(self, split: Split) -> np.ndarray:
        return self.output(split).numels * float(np.prod(split.layer.attrs["kernel"]))


class MaxPool(Pool):
    fill = float("-inf")
    keeps_bytes = 8  # where each maximum was found

    def pool(self, local: Local, x: torch.Tensor) -> torch.Tensor:
        a = local.attrs
        return MAX_POOL[x.ndim - 2](
            x, a["kernel"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"]
        )

    def pool_padded(self, local: Local, x: torch.Tensor) -> torch.Tensor:
        a = local.attrs
        return MAX_POOL[x.ndim - 2](x, a["kernel"], a["stride"], 0, a["dilation"])


class AvgPool(Pool):
    def pool(self, local: Local, x: torch.Tensor) -> torch.Tensor:
        a = local.attrs
        args = (a["kernel"], a["stride"], a["padding"], a["ceil_mode"], a["count_include_pad"])
        if x.ndim == 3:
            return functional.avg_pool1d(x, *args)
        return AVG_POOL[x.ndim - 2](x, *args, divisor_override=a["divisor"])

    def pool_padded(self, local: Local, x: torch.Tensor) -> torch.Tensor:
        """The sum over each window divided by what the stock operator would divide by."""
        kernel, stride = local.attrs["kernel"], local.attrs["stride"]
        sums = AVG_POOL[x.ndim - 2](x, kernel, stride) * float(np.prod(kernel))
        if local.attrs["divisor"]:
            return sums / local.attrs["divisor"]
        counts = torch.ones((), dtype=x.dtype, device=x.device)
        for dim in range(x.ndim - 2):
            count = torch.from_numpy(self._counts(local, dim)).to(x)
            counts = counts[..., None] * count
        return sums / counts

    @staticmethod
    def _counts(local: Local, dim: int) -> np.ndarray:
        """How many elements of this dimension each local window averages over."""
        a = local.attrs
        size = local.layer.operands[0].shape[2 + dim]
        pad = a["padding"][dim] if a["count_include_pad"] else 0
        index = np.arange(local.output.starts[2 + dim], local.output.stops[2 + dim])
        starts = index * a["stride"][dim] - a["padding"][dim]
        stops = np.minimum(starts + a["kernel"][dim], size + pad)
        return (stops - np.maximum(starts, -pad)).astype(np.float64)


def adaptive_window(ranges: Ranges, size: int, outputs: int) -> Ranges:
    """The rows that adaptive pooling of `size` rows into `outputs` reads for these outputs."""
    starts = ranges[:, 0] * size // outputs
    stops = -(-ranges[:, 1] * size // outputs)
    return np.where((ranges[:, 1] > ranges[:, 0])[:, None], np.stack([starts, stops], 1), 0)


class AdaptivePool(Strategy):
    """Pooling to a given size; the windows of neighbouring outputs may overlap."""

    keeps_inputs = True

    def __init__(self, stock: dict) -> None:
        self.stock = stock

    def needs(self, split: Split) -> tuple[Need, ...]:
        shape, out = split.layer.operands[0].shape, split.layer.shape
        ranges = [split.dim_ranges(0), split.dim_ranges(1)]
        for dim in range(2, len(shape)):
            ranges.append(adaptive_window(split.dim_ranges(dim), shape[dim], out[dim]))
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Unsplit dimensions go to the stock operator whole, split ones output by output."""
        (x,) = tensors
        num_dims = x.ndim - 2
        steps = [self._steps(local, 2 + dim) for dim in range(num_dims)]
        parts = []
        for windows in itertools.product(*steps):
            cut = (slice(None), slice(None), *(slice(a, b) for a, b, _ in windows))
            parts.append(self.stock[num_dims](x[cut], [size for _, _, size in windows]))
        for dim in reversed(range(num_dims)):
            count = len(steps[dim])
            if count > 1:
                parts = [
                    torch.cat(parts[i : i + count], 2 + dim) for i in range(0, len(parts), count)
                ]
        return parts[0]

    @staticmethod
    def _steps(local: Local, dim: int) -> list[tuple[int, int, int]]:
        """Local input rows and the number of outputs they give, one entry per stock call."""
        size, outputs = local.layer.operands[0].shape[dim], local.layer.shape[dim]
        if not local.is_split(dim):
            return [(0, size, outputs)]
        origin = local.needs[0].starts[dim]
        steps = []
        for index in range(local.output.starts[dim], local.output.stops[dim]):
            start, stop = index * size // outputs, -(-(index + 1) * size // outputs)
            steps.append((start - origin, stop - origin, 1))
        return steps

    def flops(self, split: Split) -> np.ndarray:
        return self.needs(split)[0].layout.numels.astype(float)
