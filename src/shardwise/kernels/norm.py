"""Batch norm in training, fused with the ReLU that follows it, as an operator of torch."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from shardwise.kernels.native import library
from shardwise.kernels.shape import PRECISIONS, memory_format

_ops = torch.library.Library("shardwise", "FRAGMENT")
_ops.define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool relu) "
    "-> (Tensor, Tensor, Tensor)"
)
_ops.define(
    "batch_norm_backward(Tensor dy, Tensor x, Tensor? y, Tensor? weight, Tensor mean, "
    "Tensor inverse) -> (Tensor, Tensor, Tensor)"
)


class Images(ctypes.Structure):
    """Images as the library reads them."""

    _fields_ = [(name, ctypes.c_int64) for name in ("n", "c", "pixels", "last", "threads")]


def usable(x: torch.Tensor) -> bool:
    """Whether the native kernel takes this tensor."""
    one_device = x.device.type == "cpu" and x.dtype in PRECISIONS and x.ndim == 4
    return one_device and x.numel() > 0 and library() is not None


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, and the mean and 1 / sqrt(variance + eps) of every channel of this batch.

    >>> batch_norm(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1), None, None, 0.0)[0].flatten()
    tensor([-1.,  1.])
    """
    return torch.ops.shardwise.batch_norm(x, weight, bias, eps, relu)


def _last(x: torch.Tensor) -> bool:
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _images(x: torch.Tensor) -> Images:
    n, c, h, w = x.shape
    return Images(n, c, h * w, _last(x), torch.get_num_threads())


def _pointer(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _forward(x, weight, bias, eps, relu):  # type: ignore[no-untyped-def]
    lib = library()
    x = x if _last(x) else x.contiguous()
    if not usable(x) or lib is None:
        y, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        return (y.relu() if relu else y), mean, inverse
    y, mean = torch.empty_like(x), x.new_empty(x.shape[1])
    inverse = torch.empty_like(mean)
    function = lib.lib.sw_norm_forward
    function.argtypes = [ctypes.c_int, ctypes.POINTER(Images), *[ctypes.c_void_p] * 3]
    function.argtypes += [ctypes.c_double, ctypes.c_int, *[ctypes.c_void_p] * 3]
    function(
        *(x.dtype == torch.float64, ctypes.byref(_images(x))),
        *map(_pointer, (x, weight, bias)),
        *(eps, relu),
        *map(_pointer, (y, mean, inverse)),
    )
    return y, mean, inverse


def _backward(dy, x, y, weight, mean, inverse):  # type: ignore[no-untyped-def]
    lib = library()
    last = _last(x)
    x = x if last else x.contiguous()
    dy = dy.contiguous(memory_format=memory_format(last))
    if not usable(x) or lib is None:
        dy = dy if y is None else torch.ops.aten.threshold_backward(dy, y, 0)
        return torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, mean, inverse, True, 0.0, [True, True, True]
        )
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
    function = lib.lib.sw_norm_backward
    function.argtypes = [ctypes.c_int, ctypes.POINTER(Images), *[ctypes.c_void_p] * 9]
    tensors = (dy, x, y, weight, mean, inverse, dx, dweight, dbias)
    function(x.dtype == torch.float64, ctypes.byref(_images(x)), *map(_pointer, tensors))
    return dx, dweight, dbias


_ops.impl("batch_norm", _forward, "CompositeExplicitAutograd")
_ops.impl("batch_norm_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("shardwise::batch_norm")
def _fake_forward(x, weight, bias, eps, relu):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


@torch.library.register_fake("shardwise::batch_norm_backward")
def _fake_backward(dy, x, y, weight, mean, inverse):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, bias, ctx.eps, relu = inputs
    y, mean, inverse = output
    ctx.save_for_backward(x, weight, bias, y if relu else None, mean, inverse)
    ctx.mark_non_differentiable(mean, inverse)


def _gradients(ctx, dy, *_unused):  # type: ignore[no-untyped-def]
    x, weight, bias, y, mean, inverse = ctx.saved_tensors
    if torch.is_grad_enabled():  # second derivatives are asked for: those of torch's operators
        return *_differentiable(ctx, dy), None, None
    dx, dweight, dbias = torch.ops.shardwise.batch_norm_backward(dy, x, y, weight, mean, inverse)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None, None


def _differentiable(ctx, dy):  # type: ignore[no-untyped-def]
    inputs = x, weight, bias = ctx.saved_tensors[:3]
    out = functional.batch_norm(x, None, None, weight, bias, True, 0.0, ctx.eps)
    out = out if ctx.saved_tensors[3] is None else functional.relu(out)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, dy, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


torch.library.register_autograd("shardwise::batch_norm", _gradients, setup_context=_keep)


class FusedBatchNorm2d(torch.nn.BatchNorm2d):
    """Batch norm and, if `relu`, the ReLU after it; running statistics are torch's."""

    relu = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        plain = self.training and (not self.track_running_stats or self.momentum is not None)
        if not plain or not usable(input) or input.numel() == input.shape[1]:
            y = super().forward(input)
            return functional.relu(y) if self.relu else y
        y, mean, inverse = batch_norm(input, self.weight, self.bias, self.eps, self.relu)
        if self.track_running_stats:
            self._update(mean, inverse, input.numel() // input.shape[1])
        return y

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, inverse: torch.Tensor, count: int) -> None:
        assert self.momentum is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        variance = (inverse.double().pow(-2) - self.eps) * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)  # type: ignore
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)  # type: ignore
