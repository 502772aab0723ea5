"""Max pooling of channels-last images; other tensors are left to torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwise.kernels.batch_norm import usable
from shardwise.kernels.conv_shape import Pair, pair, strictly_last
from shardwise.kernels.native import int64s, library


class Windows(ctypes.Structure):
    """A pooling as the library reads it."""

    _fields_ = int64s(
        *("n", "c", "h", "w", "p", "q", "r", "s"),
        *("stride_h", "stride_w", "pad_h", "pad_w", "threads"),
    )


class Pooling(NamedTuple):
    """What a pooling does, as torch names it."""

    kernel_size: Pair
    stride: Pair
    padding: Pair
    ceil_mode: bool

    def out(self, size: Sequence[int]) -> Pair:
        """The windows of an image of this height and width."""
        parts = zip(size, *self[:3], strict=True)
        down, across = (_count(*part, self.ceil_mode) for part in parts)
        return down, across


class NativeMaxPool(torch.autograd.Function):
    """The largest number of every window, and its gradient."""

    @staticmethod
    def forward(ctx, x, how: Pooling):  # type: ignore[no-untyped-def]
        lib, out = library(), how.out(x.shape[2:])
        assert lib is not None
        sizes = (*x.shape[:2], *out)
        y = torch.empty(sizes, dtype=x.dtype, memory_format=torch.channels_last)
        which = torch.empty(y.numel(), dtype=torch.uint8)
        numbers = (n for pair in how[:3] for n in pair)
        windows = Windows(*x.shape, *out, *numbers, torch.get_num_threads())
        lib.lib.sw_pool_forward(
            *(x.dtype == torch.float64, ctypes.byref(windows)),
            *(x.data_ptr(), y.data_ptr(), which.data_ptr()),
        )
        ctx.save_for_backward(x, which)
        ctx.windows, ctx.how = windows, how
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, which = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are asked for: those of torch's operator
            y = functional.max_pool2d(x, **ctx.how._asdict())
            return *torch.autograd.grad(y, x, dy, create_graph=True), None
        lib = library()
        assert lib is not None
        dy = dy.resolve_neg().contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        lib.lib.sw_pool_backward(
            *(x.dtype == torch.float64, ctypes.byref(ctx.windows)),
            *(dy.data_ptr(), which.data_ptr(), dx.data_ptr()),
        )
        return dx, None


def _count(size: int, k: int, step: int, pad: int, up: bool) -> int:
    """Windows along one dimension; with `up`, one that begins inside but ends outside counts.

    >>> _count(6, 3, 2, 0, False), _count(6, 3, 2, 0, True)
    (2, 3)
    """
    room = size + 2 * pad - k
    count = (room + (step - 1 if up else 0)) // step + 1
    return count - 1 if up and (count - 1) * step >= size + pad else count


class FastMaxPool2d(torch.nn.MaxPool2d):
    """Max pooling; the kernel where it takes the input, else torch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        sizes = (self.kernel_size, self.stride, self.padding)
        how = Pooling(*map(pair, sizes), ceil_mode=self.ceil_mode)
        # A window with dilation may have no pixel at all.
        if self.return_indices or pair(self.dilation) != (1, 1) or not _takes(input, how):
            return super().forward(input)  # type: ignore[return-value]
        return NativeMaxPool.apply(input, how)  # type: ignore[return-value]


def _takes(x: torch.Tensor, how: Pooling) -> bool:
    """What torch refuses is left to it too: it says why."""
    if not usable(x) or not strictly_last(x) or how.kernel_size[0] * how.kernel_size[1] > 256:
        return False
    padded = all(2 * pad <= k for k, pad in zip(how.kernel_size, how.padding, strict=True))
    return padded and min(how.out(x.shape[2:])) > 0
