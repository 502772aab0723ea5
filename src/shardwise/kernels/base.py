"""P1's BASE: im2col is built for the forward pass and kept for the gradient of the filters."""

from __future__ import annotations

import torch

from shardwise.kernels import run
from shardwise.kernels.native import DONE, library
from shardwise.kernels.run import Settings
from shardwise.kernels.shape import memory_format, shape_of


class KeptColumns(torch.autograd.Function):
    """A convolution of one group whose im2col matrix lives until the backward pass."""

    @staticmethod
    def forward(ctx, x, w, bias, settings: Settings):  # type: ignore[no-untyped-def]
        lib, shape = library(), shape_of(x, w, *settings)
        assert lib is not None and shape is not None and shape.groups == 1
        n, f, p, q = shape.out
        columns = x.new_empty(n * p * q * shape.w[1] * shape.w[2] * shape.w[3])
        problem = shape.problem(torch.get_num_threads())
        lib.im2col(problem, x, columns)
        y = torch.empty((n, f, p, q), dtype=x.dtype, memory_format=memory_format(shape.last))
        tensors = (x, w, None, bias)
        assert lib.run("base", "fwd", problem, tensors, y, run.persistent, columns) == DONE
        ctx.save_for_backward(x, w, columns)
        ctx.settings, ctx.problem, ctx.last = settings, problem, shape.last
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, w, columns = ctx.saved_tensors
        lib = library()
        assert lib is not None
        dy = dy.contiguous(memory_format=memory_format(ctx.last))
        dx, dw = None, torch.empty_like(w)
        if ctx.needs_input_grad[0]:
            dx = run.backward_data(dy, x, w, ctx.settings, "base")
        tensors = (x, None, dy, None)
        status = lib.run("base", "dw", ctx.problem, tensors, dw, run.persistent, columns)
        assert status == DONE
        db = dy.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None
