"""Convolutions, plain and transposed, in any number of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.layer_graph import Layer
from shardwise.kernels.tuner import convolution
from shardwise.operators.calls import Call, Request, Requests, of_samples, per_dim
from shardwise.operators.linear import Contraction
from shardwise.operators.splits import Split, rows, window
from shardwise.operators.strategy import Function, Local, Need, operator

Sizes = tuple[int, ...]  # one number per spatial dimension


@dataclass(frozen=True)
class Taps:
    """What convolutions, plain and transposed, say of their windows."""

    kernel: Sizes
    stride: Sizes
    dilation: Sizes
    groups: int


@dataclass(frozen=True)
class ConvAttrs(Taps):
    pads: tuple[tuple[int, int], ...]  # before and behind


@dataclass(frozen=True)
class TransposeAttrs(Taps):
    padding: Sizes


class AnyConv(Contraction):
    """What plain and transposed convolutions share."""

    labels_by_position = True

    @staticmethod
    def taps(call: Call) -> tuple[Sizes, Sizes, Sizes, int]:
        """What both kinds say of their windows, in the order of `Taps`."""
        kernel = call.shape(call["weight"])[2:]
        stride, dilation = (per_dim(call[name], len(kernel)) for name in ("stride", "dilation"))
        return kernel, stride, dilation, call["groups"]

    def axes(self, layer: Layer[Taps]) -> dict[str, int]:
        channels = layer.operands[0].shape[1] if layer.attrs.groups == 1 else 1
        axes = super().axes(layer) | {"f": layer.shape[1], "c": channels}
        return axes if channels > 1 else {a: k for a, k in axes.items() if a != "c"}

    def needs(self, split: Split) -> tuple[Need, ...]:
        x = split.layer.operands[0]
        filters = split.ranges(split.layer.shape[1], "f")
        channels = self.channels(split, filters)
        space = [self.space(split, dim) for dim in range(len(x.shape) - 2)]
        inputs = Layout.of(x.shape, [split.dim_ranges(0), channels, *space])
        return Need(inputs), Need(self.weight(split, filters)), *self.bias(split)

    def channels(self, split: Split[Taps], filters: Ranges) -> Ranges:
        """Input channels: those of block c, or those of the groups these filters belong to."""
        num_channels, groups = split.layer.operands[0].shape[1], split.layer.attrs.groups
        if groups == 1:
            return split.ranges(num_channels, "c")
        return rows(filters, split.layer.shape[1] // groups) * (num_channels // groups)

    def weight(self, split: Split, filters: Ranges) -> Layout:
        """Where the blocks of the weight lie."""
        raise NotImplementedError

    def space(self, split: Split, dim: int) -> Ranges:
        """The rows of one dimension that an output block reads."""
        raise NotImplementedError


@operator("conv", "conv1d", "conv2d", "conv3d")
class Conv(AnyConv):
    """Convolution in any number of spatial dimensions."""

    reads_beyond = True

    def read(self, call: Call) -> Request | Requests:
        kernel, stride, dilation, groups = self.taps(call)
        pads = _pads(call["padding"], kernel, dilation)
        attrs = ConvAttrs(kernel, stride, dilation, groups, pads)
        request = Request("conv", call.pick("input", "weight", "bias"), attrs)
        return of_samples(call, request, len(kernel))

    def makes_new_tensor(self, layer: Layer) -> bool:
        return True

    def weight(self, split: Split[ConvAttrs], filters: Ranges) -> Layout:
        shape = split.layer.operands[1].shape
        whole_group = split.layer.attrs.groups > 1
        channels = split.whole(shape[1]) if whole_group else split.ranges(shape[1], "c")
        return Layout.of(shape, [filters, channels, *map(split.whole, shape[2:])])

    def space(self, split: Split[ConvAttrs], dim: int) -> Ranges:
        """The rows an output block reads, halo and padding included.

        All of them, without padding, where there is no split and the stock operator can pad.
        """
        attrs, size = split.layer.attrs, split.layer.operands[0].shape[2 + dim]
        if split.dim_degree(2 + dim) == 1 and self.stock_padding(split.layer, dim) is not None:
            return split.whole(size)
        ranges, left = split.dim_ranges(2 + dim), attrs.pads[dim][0]
        return window(ranges, attrs.kernel[dim], attrs.stride[dim], left, attrs.dilation[dim])

    @staticmethod
    def stock_padding(layer: Layer[ConvAttrs], dim: int) -> int | None:
        """The padding the stock operator can do itself, if it is the same on both sides."""
        left, right = layer.attrs.pads[dim]
        return left if left == right else None

    def run(self, local: Local[ConvAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.lower(local)(tensors)

    def lower(self, local: Local[ConvAttrs]) -> Function:
        attrs = local.attrs
        paddings = [self.stock_padding(local.layer, dim) for dim in range(len(attrs.kernel))]
        padding = [
            0 if local.is_split[2 + dim] or p is None else p for dim, p in enumerate(paddings)
        ]
        settings = (list(attrs.stride), padding, list(attrs.dilation), attrs.groups)
        cuts_groups = attrs.groups > 1 and local.output.shape[1] != local.layer.shape[1]
        width = attrs.dilation[-1] * (attrs.kernel[-1] - 1) + 1 + attrs.stride[-1]

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            x, weight = tensors[0], tensors[1]
            if _stock_may_be_wrong(local, x, width):
                return run([t.float() for t in tensors]).to(x.dtype)
            bias = tensors[2] if len(tensors) > 2 and tensors[2].numel() else None
            if cuts_groups:
                return _grouped(local, x, weight, bias, padding)
            return convolution(x, weight, bias, *settings)

        return run

    def flops(self, split: Split) -> np.ndarray:
        outputs = (self.partial(split) or self.output(split)).numels
        block = self.needs(split)[1].layout
        taps = (block.bounds[:, 1:, 1] - block.bounds[:, 1:, 0]).prod(axis=1)
        return 2.0 * outputs * taps


def _pads(
    padding: str | int | Sequence[int], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    if padding == "same":  # torch puts the odd one on the right
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    assert not isinstance(padding, str)
    return tuple((p, p) for p in per_dim(padding, len(kernel)))


def _stock_may_be_wrong(local: Local[Taps], x: torch.Tensor, width: int) -> bool:
    """Whether the stock convolution may be wrong: strides over blocks no wider than this.

    With AVX-512, torch 2.11 leaves outputs of width 1 unwritten in 16 bits on CPUs, and so the
    gradients of such inputs of transposed convolutions.
    """
    if local.attrs.stride[-1] == 1 or x.shape[-1] > width or not x.is_cpu:
        return False
    return x.dtype in (torch.bfloat16, torch.float16)


def group_chunks(start: int, stop: int, per_group: int) -> list[tuple[int, int]]:
    """Filters [start, stop) cut into part of a group, whole groups, part of a group.

    >>> group_chunks(1, 8, 3)
    [(1, 3), (3, 6), (6, 8)]
    """
    first = min(-(-start // per_group) * per_group, stop)
    last = max(stop // per_group * per_group, first)
    edges = sorted({start, first, last, stop})
    return list(pairwise(edges))


def _grouped(
    local: Local[ConvAttrs],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: list[int],
) -> torch.Tensor:
    """A convolution of the local filters, which may begin or end inside a group."""
    attrs, groups = local.attrs, local.attrs.groups
    fixed = (list(attrs.stride), padding, list(attrs.dilation))
    start, stop = local.output.starts[1], local.output.stops[1]
    per_group = local.layer.shape[1] // groups
    width = local.layer.operands[0].shape[1] // groups
    parts = []
    for a, b in group_chunks(start, stop, per_group):
        first, last = a // per_group, -(-b // per_group)
        channels = slice(first * width - local.needs[0].starts[1], None)
        x_part = x[:, channels][:, : (last - first) * width]
        own = slice(a - start, b - start)
        b_part = bias[own] if bias is not None else None
        parts.append(convolution(x_part, weight[own], b_part, *fixed, last - first))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@operator("conv_transpose", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
class ConvTranspose(AnyConv):
    """Transposed convolution; w is [C, F / groups, R, S]."""

    def read(self, call: Call) -> Request | Requests:
        taps = self.taps(call)
        attrs = TransposeAttrs(*taps, per_dim(call["padding"], len(taps[0])))
        request = Request("conv_transpose", call.pick("input", "weight", "bias"), attrs)
        return of_samples(call, request, len(taps[0]))

    def weight(self, split: Split[TransposeAttrs], filters: Ranges) -> Layout:
        shape, groups = split.layer.operands[1].shape, split.layer.attrs.groups
        channels = self.channels(split, filters)
        if groups > 1:  # blocks of filters may share a group: keep the channels' rows whole
            return Layout.of(shape, [channels, *map(split.whole, shape[1:])])
        return Layout.of(shape, [channels, filters, *map(split.whole, shape[2:])])

    def space(self, split: Split[TransposeAttrs], dim: int) -> Ranges:
        """The inputs i with i * stride - padding + tap inside the output block."""
        attrs, size = split.layer.attrs, split.layer.operands[0].shape[2 + dim]
        if split.dim_degree(2 + dim) == 1:
            return split.whole(size)
        ranges = split.dim_ranges(2 + dim)
        stride, padding = attrs.stride[dim], attrs.padding[dim]
        reach = attrs.dilation[dim] * (attrs.kernel[dim] - 1)
        starts = -(-(ranges[:, 0] + padding - reach) // stride)
        stops = (ranges[:, 1] - 1 + padding) // stride + 1
        return np.clip(np.stack([starts, stops], axis=1), 0, size) * split.used[:, None]

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        x, weight, bias = [*tensors, None][:3]
        if _stock_may_be_wrong(local, x, 1):
            return self.run(local, [t.float() for t in tensors]).to(x.dtype)
        if x.numel() == 0:  # only positions that no input reaches
            y = weight.new_zeros(local.output.shape)
        else:
            y = self._filters(local, x, weight)
        return y if bias is None or not bias.numel() else y + bias.view(-1, *[1] * (y.ndim - 2))

    def _filters(
        self, local: Local[TransposeAttrs], x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Whole groups are computed; the local filters may begin or end inside one."""
        if local.attrs.groups == 1:
            return self._positions(local, x, weight, 1)
        per_group = weight.shape[1]
        start, stop = local.output.starts[1], local.output.stops[1]
        first, last = start // per_group, -(-stop // per_group)
        y = self._positions(local, x, weight, last - first)
        return y[:, start - first * per_group : stop - first * per_group]

    def _positions(
        self, local: Local[TransposeAttrs], x: torch.Tensor, weight: torch.Tensor, groups: int
    ) -> torch.Tensor:
        """Split dimensions: every position these inputs reach, cut to the output block."""
        attrs, shape = local.attrs, local.layer.shape
        stride, dilation = attrs.stride, attrs.dilation
        padding, extra, crops = [], [], []
        for dim, (k, s, p, d) in enumerate(
            zip(attrs.kernel, stride, attrs.padding, dilation, strict=True)
        ):
            size = x.shape[2 + dim]
            if not local.is_split[2 + dim]:
                padding.append(p)
                extra.append(shape[2 + dim] - ((size - 1) * s - 2 * p + d * (k - 1) + 1))
                crops = [0, 0, *crops]
            else:
                padding.append(0)
                extra.append(0)
                origin = local.needs[0].starts[2 + dim] * s - p
                reached = origin + (size - 1) * s + d * (k - 1) + 1
                left = origin - local.output.starts[2 + dim]
                crops = [left, local.output.stops[2 + dim] - reached, *crops]
        y = torch.convolution(x, weight, None, stride, padding, dilation, True, extra, groups)
        return functional.pad(y, crops) if any(crops) else y

    def flops(self, split: Split[TransposeAttrs]) -> np.ndarray:
        inputs = self.needs(split)[0].layout.numels
        shape = split.layer.operands[1].shape
        filters = split.ranges(split.layer.shape[1], "f")
        per_group = (filters[:, 1] - filters[:, 0]) / split.layer.attrs.groups
        return 2.0 * inputs * per_group * float(np.prod(shape[2:]))
