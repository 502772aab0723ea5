"""Max pooling of channels-last images; other tensors are left to torch."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from shardwise.kernels.native import library
from shardwise.kernels.norm import usable
from shardwise.kernels.shape import strictly_last

Pair = tuple[int, int]


class Windows(ctypes.Structure):
    """A pooling as the library reads it."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("n", "c", "h", "w", "p", "q", "r", "s"),
            *("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "threads"),
        )
    ]


class MaxPool(torch.autograd.Function):
    """The largest number of every window, and its gradient."""

    @staticmethod
    def forward(ctx, x, out: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair):  # type: ignore[no-untyped-def]
        lib = library()
        assert lib is not None
        sizes = (*x.shape[:2], *out)
        y = torch.empty(sizes, dtype=x.dtype, memory_format=torch.channels_last)
        which = torch.empty(y.numel(), dtype=torch.uint8)
        how = (*kernel, *stride, *padding, *dilation, torch.get_num_threads())
        windows, double = Windows(*x.shape, *out, *how), x.dtype == torch.float64
        lib.lib.sw_pool_forward(
            double, ctypes.byref(windows), x.data_ptr(), y.data_ptr(), which.data_ptr()
        )
        ctx.save_for_backward(x, which)
        ctx.windows, ctx.how = windows, (kernel, stride, padding, dilation, out)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, which = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are asked for: those of torch's operator
            *how, out = ctx.how
            y = functional.max_pool2d(x, *how, ceil_mode=ceil_mode(x, out, *how))
            return *torch.autograd.grad(y, x, dy, create_graph=True), *[None] * 5
        lib = library()
        assert lib is not None
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        lib.lib.sw_pool_backward(
            *(x.dtype == torch.float64, ctypes.byref(ctx.windows)),
            *(dy.data_ptr(), which.data_ptr(), dx.data_ptr()),
        )
        return dx, *[None] * 5


def output_size(size: int, k: int, step: int, pad: int, dilation: int, up: bool) -> int:
    """Windows along one dimension; with `up`, one that begins inside but ends outside counts.

    >>> output_size(6, 3, 2, 0, 1, False), output_size(6, 3, 2, 0, 1, True)
    (2, 3)
    """
    room = size + 2 * pad - dilation * (k - 1) - 1
    count = (room + (step - 1 if up else 0)) // step + 1
    return count - 1 if up and (count - 1) * step >= size + pad else count


def ceil_mode(x: torch.Tensor, out: Pair, *how: Pair) -> bool:
    """Whether these are the sizes of windows that end outside."""
    return out != tuple(output_size(*one, False) for one in zip(x.shape[2:], *how, strict=True))


class FastMaxPool2d(torch.nn.MaxPool2d):
    """Max pooling; the kernel where it takes the input, else torch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        how = [_pair(v) for v in (self.kernel_size, self.stride, self.padding, self.dilation)]
        if (
            self.return_indices
            or not usable(input)
            or not strictly_last(input)
            or how[0][0] * how[0][1] > 256
            or any(2 * pad > k for k, pad in zip(how[0], how[2], strict=True))
        ):
            return super().forward(input)
        parts = zip(input.shape[2:], *how, strict=True)
        out = tuple(output_size(*part, self.ceil_mode) for part in parts)
        if min(out) < 1:
            return super().forward(input)
        return MaxPool.apply(input, out, *how)  # type: ignore[return-value]


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
