"""P1's BASE: im2col is built for the forward pass and kept for the gradient of the filters."""

from __future__ import annotations

import ctypes

import torch

from shardwise.kernels import dispatch
from shardwise.kernels.conv_shape import memory_format, shape_of
from shardwise.kernels.dispatch import Settings
from shardwise.kernels.native import DONE, NO_MEMORY, Library, library


class KeptColumns(torch.autograd.Function):
    """A convolution of one group whose im2col matrix lives until the backward pass."""

    @staticmethod
    def forward(ctx, x, w, bias, settings: Settings):  # type: ignore[no-untyped-def]
        lib, shape = library(), shape_of(x, w, *settings)
        if lib is None or shape is None or shape.groups != 1:
            raise ValueError(f"BASE takes no convolution of {tuple(x.shape)} by {tuple(w.shape)}")
        n, f, p, q = shape.out
        columns = x.new_empty(n * p * q * shape.w[1] * shape.w[2] * shape.w[3])
        problem = shape.problem(torch.get_num_threads())
        double, about = x.dtype == torch.float64, ctypes.byref(problem)
        lib.lib.sw_im2col(double, about, x.data_ptr(), columns.data_ptr())
        y = torch.empty((n, f, p, q), dtype=x.dtype, memory_format=memory_format(shape.last))
        _base(lib, "fwd", problem, (x, w, None, bias), y, columns)
        ctx.save_for_backward(x, w, columns)
        ctx.lib, ctx.settings, ctx.problem, ctx.last = lib, settings, problem, shape.last
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, w, columns = ctx.saved_tensors
        dy = dy.contiguous(memory_format=memory_format(ctx.last))
        dx, dw = None, torch.empty_like(w)
        if ctx.needs_input_grad[0]:
            dx = dispatch.backward("dx", dy, x, w, ctx.settings, "base")
        _base(ctx.lib, "dw", ctx.problem, (x, None, dy, None), dw, columns)
        db = dy.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def _base(lib: Library, direction: str, problem, tensors, out, columns) -> None:  # type: ignore[no-untyped-def]
    """Computes `out`, or raises: it holds whatever was in memory before."""
    status = lib.run("base", direction, problem, tensors, out, dispatch.persistent, columns)
    if status == NO_MEMORY:
        raise MemoryError(f"BASE, {direction}: no memory is left for its workspace")
    if status != DONE:
        raise RuntimeError(f"BASE, {direction}: status {status}")
