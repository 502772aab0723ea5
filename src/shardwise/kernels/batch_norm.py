"""Batch norm in training, together with the ReLU that follows it."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from shardwise.kernels.conv_shape import PRECISIONS, is_eager, memory_format, strictly_last
from shardwise.kernels.native import int64s, library
from shardwise.kernels.relu import applied


class Images(ctypes.Structure):
    """Images as the library reads them."""

    _fields_ = int64s("n", "c", "pixels", "last", "threads")


def usable(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the native kernel takes these tensors."""
    if not is_eager(x, *others) or library() is None or x.is_neg():
        return False
    known = x.device.type == "cpu" and x.dtype in PRECISIONS and x.ndim == 4 and x.numel() > 0
    return known and all(t is None or (t.dtype == x.dtype and t.is_contiguous()) for t in others)


def _images(x: torch.Tensor) -> Images:
    n, c, h, w = x.shape
    return Images(n, c, h * w, strictly_last(x), torch.get_num_threads())


def _pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


class NativeBatchNorm(torch.autograd.Function):
    """`running` is the mean and variance that a module keeps, and its momentum; they are updated.

    >>> x = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    >>> NativeBatchNorm.apply(x, None, None, (None, None, 0.0), 0.0, False).flatten()
    tensor([-1.,  1.])
    """

    @staticmethod
    def forward(ctx, x, weight, bias, running, eps: float, relu: bool):  # type: ignore[no-untyped-def]
        lib = library()
        assert lib is not None
        x = x if strictly_last(x) else x.contiguous()
        y, mean = torch.empty_like(x), x.new_empty(x.shape[1])
        inverse = torch.empty_like(mean)
        lib.lib.sw_norm_forward(
            *(x.dtype == torch.float64, ctypes.byref(_images(x))),
            *_pointers(x, weight, bias, mean, inverse, *running[:2]),
            *(running[2], eps, relu, y.data_ptr()),
        )
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.eps, ctx.relu = eps, relu
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # second derivatives are asked for: those of torch's operators
            return *_differentiable(ctx, dy), None, None, None
        lib, (x, weight, bias, mean, inverse) = library(), ctx.saved_tensors
        assert lib is not None
        dy = dy.resolve_neg().contiguous(memory_format=memory_format(strictly_last(x)))
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        lib.lib.sw_norm_backward(
            *(x.dtype == torch.float64, ctypes.byref(_images(x))),
            *_pointers(dy, x, weight, bias, mean, inverse),
            *(ctx.relu, *_pointers(dx, dweight, dbias)),
        )
        wanted = zip((weight, bias), (dweight, dbias), strict=True)
        return dx, *(None if t is None else d for t, d in wanted), None, None, None


def _differentiable(ctx, dy):  # type: ignore[no-untyped-def]
    inputs = x, weight, bias = ctx.saved_tensors[:3]
    out = functional.batch_norm(x, None, None, weight, bias, True, 0.0, ctx.eps)
    out = functional.relu(out) if ctx.relu else out
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, dy, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


class FusedBatchNorm2d(torch.nn.BatchNorm2d):
    """Batch norm and, if `relu`, the ReLU after it; what it cannot do is left to torch."""

    relu = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kept = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        simple = self.training and (not self.track_running_stats or self.momentum is not None)
        if (
            not simple
            or not usable(input, self.weight, self.bias, *kept)
            or input.numel() == input.shape[1]
        ):
            y = super().forward(input)
            return applied(functional.relu(y)) if self.relu else y
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        running = (*kept, self.momentum or 0.0)
        y = NativeBatchNorm.apply(input, self.weight, self.bias, running, self.eps, self.relu)
        return applied(y) if self.relu else y  # type: ignore[arg-type, return-value]
