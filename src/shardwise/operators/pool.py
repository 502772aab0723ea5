"""Pooling: every output position reads a window of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from shardwise.errors import CaptureError
from shardwise.geometry.layout import Layout, Ranges
from shardwise.operators.along import last
from shardwise.operators.calls import Call, Request, Requests, of_samples, per_dim
from shardwise.operators.reduce import reduction
from shardwise.operators.splits import Split, window
from shardwise.operators.strategy import Local, Need, Strategy, operator

NUM_DIMS = (1, 2, 3)
Stock = dict[int, Callable[..., torch.Tensor]]  # operators of torch, by their number of dimensions


def by_num_dims(name: str) -> Stock:
    """What torch has for an operator in one, two and three dimensions."""
    return {n: getattr(functional, f"{name}{n}d") for n in NUM_DIMS}


MAX_POOL, AVG_POOL = by_num_dims("max_pool"), by_num_dims("avg_pool")


@dataclass(frozen=True)
class PoolAttrs:
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool
    dilation: tuple[int, ...]


@dataclass(frozen=True)
class AvgPoolAttrs(PoolAttrs):
    count_include_pad: bool
    divisor: int | None


@dataclass(frozen=True)
class IndexedPoolAttrs(PoolAttrs):
    item: int  # maxima, or places


class Pool(Strategy):
    """Pooling with a fixed kernel; split space is padded by the transfer, with `fill`."""

    fill = 0.0
    keeps_inputs, draws = True, False
    reads_beyond = True

    @staticmethod
    def window(call: Call) -> PoolAttrs:
        """What all poolings say of their windows."""
        num_dims = call.num_dims
        kernel = per_dim(call["kernel_size"], num_dims)
        return PoolAttrs(
            kernel=kernel,
            stride=per_dim(call["stride"], num_dims) if call["stride"] else kernel,
            padding=per_dim(call["padding"], num_dims),
            ceil_mode=call["ceil_mode"],
            dilation=per_dim(call.args.get("dilation", 1), num_dims),  # averages have none
        )

    def needs(self, split: Split[PoolAttrs]) -> tuple[Need, ...]:
        shape, a = split.layer.operands[0].shape, split.layer.attrs
        ranges = [split.dim_ranges(0), split.dim_ranges(1)]
        for dim in range(len(shape) - 2):
            if split.splits_space:
                window_of = a.kernel[dim], a.stride[dim], a.padding[dim], a.dilation[dim]
                ranges.append(window(split.dim_ranges(2 + dim), *window_of))
            else:
                ranges.append(split.whole(shape[2 + dim]))
        return (Need(Layout.of(shape, ranges), self.fill),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.pool(local, tensors[0], any(local.is_split[2:]))

    def pool(self, local: Local, x: torch.Tensor, padded: bool) -> torch.Tensor:
        """All of space, or a part of it, on an input that already holds its padding."""
        raise NotImplementedError

    def flops(self, split: Split[PoolAttrs]) -> np.ndarray:
        return self.output(split).numels * float(np.prod(split.layer.attrs.kernel))


def pooled(op: str, call: Call, attrs: PoolAttrs | None = None) -> Request | Requests:
    """Pooling of samples, or of a single one: its first dimension is channels, of which it has."""
    given = call.shape()
    if len(given) == call.num_dims + 1 and given[0] == 0:
        raise CaptureError(f"a sample of {'x'.join(map(str, given))} has no channels to pool")
    return of_samples(call, Request(op, (call.x,), attrs), call.num_dims)


@operator("max_pool", "max_pool1d", "max_pool2d", "max_pool3d")
class MaxPool(Pool):
    fill = float("-inf")
    keeps_bytes = 8  # where each maximum was found

    def read(self, call: Call) -> Request | Requests:
        return pooled("max_pool", call, self.window(call))

    def pool(self, local: Local[PoolAttrs], x: torch.Tensor, padded: bool) -> torch.Tensor:
        a = local.attrs
        padding, ceil_mode = (0, False) if padded else (a.padding, a.ceil_mode)
        return MAX_POOL[x.ndim - 2](x, a.kernel, a.stride, padding, a.dilation, ceil_mode)


@operator("max_pool_indices", *(f"max_pool{n}d_with_indices" for n in (2, 3)))
class MaxPoolIndices(MaxPool):
    """The maxima, or where they were found: counted through the whole of space."""

    def read(self, call: Call) -> Request | Requests:
        attrs = IndexedPoolAttrs(**vars(self.window(call)), item=call.item or 0)
        return pooled("max_pool_indices", call, attrs)

    def pool(self, local: Local, x: torch.Tensor, padded: bool) -> torch.Tensor:
        a: IndexedPoolAttrs = local.attrs
        if a.item == 0:
            return super().pool(local, x, padded)
        padding, ceil_mode = (0, False) if padded else (a.padding, a.ceil_mode)
        pool = MAX_POOL[x.ndim - 2]
        found = pool(x, a.kernel, a.stride, padding, a.dilation, ceil_mode, return_indices=True)[1]
        return self._counted(local, x, found) if padded else found

    @staticmethod
    def _counted(local: Local, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """From places in this rank's part to places in the whole.

        Where all of a window is -inf torch says its first place that is not padding.
        """
        places, unit = torch.zeros_like(found), 1
        for dim in reversed(range(2, x.ndim)):
            size, step = local.layer.operands[0].shape[dim], local.attrs.dilation[dim - 2]
            place = found % x.shape[dim] + local.needs[0].starts[dim]
            places += torch.where(place < 0, place % step, place) * unit
            found, unit = found // x.shape[dim], unit * size
        return places


@operator("avg_pool", "avg_pool1d", "avg_pool2d", "avg_pool3d")
class AvgPool(Pool):
    def read(self, call: Call) -> Request | Requests:
        divisor = None if call.num_dims == 1 else call["divisor_override"]
        window = vars(self.window(call))
        attrs = AvgPoolAttrs(**window, count_include_pad=call["count_include_pad"], divisor=divisor)
        return pooled("avg_pool", call, attrs)

    def pool(self, local: Local[AvgPoolAttrs], x: torch.Tensor, padded: bool) -> torch.Tensor:
        a = local.attrs
        if padded:
            return self._padded(local, x)
        args = (a.kernel, a.stride, a.padding, a.ceil_mode, a.count_include_pad)
        if x.ndim == 3:
            return functional.avg_pool1d(x, *args)
        return AVG_POOL[x.ndim - 2](x, *args, divisor_override=a.divisor)

    def _padded(self, local: Local[AvgPoolAttrs], x: torch.Tensor) -> torch.Tensor:
        """The sum over each window divided by what the stock operator would divide by."""
        kernel, stride = local.attrs.kernel, local.attrs.stride
        sums = AVG_POOL[x.ndim - 2](x, kernel, stride) * float(np.prod(kernel))
        if local.attrs.divisor:
            return sums / local.attrs.divisor
        counts = torch.ones((), dtype=x.dtype, device=x.device)
        for dim in range(x.ndim - 2):
            count = torch.from_numpy(self._counts(local, dim)).to(x)
            counts = counts[..., None] * count
        return sums / counts

    @staticmethod
    def _counts(local: Local[AvgPoolAttrs], dim: int) -> np.ndarray:
        """How many elements of this dimension each local window averages over."""
        a = local.attrs
        size = local.layer.operands[0].shape[2 + dim]
        pad = a.padding[dim] if a.count_include_pad else 0
        index = np.arange(local.output.starts[2 + dim], local.output.stops[2 + dim])
        starts = index * a.stride[dim] - a.padding[dim]
        stops = np.minimum(starts + a.kernel[dim], size + pad)
        return (stops - np.maximum(starts, -pad)).astype(np.float64)


def adaptive_window(ranges: Ranges, size: int, outputs: int) -> Ranges:
    """The rows that adaptive pooling of `size` rows into `outputs` reads for these outputs."""
    starts = ranges[:, 0] * size // outputs
    stops = -(-ranges[:, 1] * size // outputs)
    return np.where((ranges[:, 1] > ranges[:, 0])[:, None], np.stack([starts, stops], 1), 0)


class AdaptivePool(Strategy):
    """Pooling to a given size; the windows of neighbouring outputs may overlap."""

    keeps_inputs, draws = True, False
    stock: Stock

    def needs(self, split: Split) -> tuple[Need, ...]:
        shape, out = split.layer.operands[0].shape, split.layer.shape
        ranges = [split.dim_ranges(0), split.dim_ranges(1)]
        for dim in range(2, len(shape)):
            ranges.append(adaptive_window(split.dim_ranges(dim), shape[dim], out[dim]))
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Unsplit dimensions go to the stock operator whole, split ones output by output."""
        return self._pooled(local, tensors[0], (slice(None), slice(None)))

    def _pooled(self, local: Local, x: torch.Tensor, cut: tuple[slice, ...]) -> torch.Tensor:
        """What comes of a part of x, of which the first dimensions are cut."""
        dim, outputs = len(cut), local.layer.shape
        if dim == x.ndim:
            sizes = [1 if local.is_split[d] else outputs[d] for d in range(2, dim)]
            return self.stock[dim - 2](x[cut], sizes)
        if not local.is_split[dim]:
            return self._pooled(local, x, (*cut, slice(None)))
        index = np.arange(local.output.starts[dim], local.output.stops[dim])
        ranges = np.stack([index, index + 1], axis=1)
        windows = adaptive_window(ranges, local.layer.operands[0].shape[dim], outputs[dim])
        windows = (windows - local.needs[0].starts[dim]).tolist()
        parts = [self._pooled(local, x, (*cut, slice(a, b))) for a, b in windows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def flops(self, split: Split) -> np.ndarray:
        return self.needs(split)[0].layout.numels.astype(float)


@operator("adaptive_avg_pool", *(f"adaptive_avg_pool{n}d" for n in NUM_DIMS))
class AdaptiveAvgPool(AdaptivePool):
    stock = by_num_dims("adaptive_avg_pool")

    def read(self, call: Call) -> Request | Requests:
        num_dims, last = call.num_dims, len(call.shape())
        if set(per_dim(call["output_size"], num_dims)) == {1}:  # a mean: it can be summed in parts
            return reduction(call, "mean", tuple(range(last - num_dims, last)), keepdim=True)
        return pooled("adaptive_avg_pool", call)


@operator("adaptive_max_pool", *(f"adaptive_max_pool{n}d" for n in NUM_DIMS))
class AdaptiveMaxPool(AdaptivePool):
    stock = by_num_dims("adaptive_max_pool")

    def read(self, call: Call) -> Request | Requests | None:
        if call.item:  # where each maximum was found
            return last(call, call.num_dims)
        return pooled("adaptive_max_pool", call)
