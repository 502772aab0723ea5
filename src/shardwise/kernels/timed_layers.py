"""Layers that are no convolutions but have a kernel too: timed against torch's, as those are."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from shardwise.kernels.conv_shape import (
    PRECISIONS,
    Sizes,
    is_eager,
    memory_format,
    per_dim,
    strictly_last,
)
from shardwise.kernels.dispatch import STOCK
from shardwise.kernels.native import int64s, library
from shardwise.kernels.tuner import MARGIN, Tuner, interleaved

_MARK = "_shardwise_relu"


def applied(y: torch.Tensor) -> torch.Tensor:
    """Marks the output of a layer that has applied the ReLU; unmarked, it is only applied twice."""
    if not torch.compiler.is_compiling():
        setattr(y, _MARK, True)
    return y


class AppliedReLU(torch.nn.ReLU):
    """The ReLU of numbers that had none: someone may have put another layer before it since."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input if getattr(input, _MARK, False) else super().forward(input)


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


def call(kernel: str, x: torch.Tensor, about: ctypes.Structure, *arguments: Any) -> None:
    """Runs a kernel on numbers like those of x; tensors are handed over by their addresses."""
    lib = library()
    assert lib is not None
    values = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
    getattr(lib.lib, kernel)(x.dtype == torch.float64, ctypes.byref(about), *values)


class NativeBatchNorm(torch.autograd.Function):
    """`running` is the mean and variance that a module keeps, and its momentum; they are updated.

    >>> x = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    >>> NativeBatchNorm.apply(x, None, None, (None, None, 0.0), 0.0, False).flatten()
    tensor([-1.,  1.])
    """

    @staticmethod
    def forward(ctx, x, weight, bias, running, eps: float, relu: bool):  # type: ignore[no-untyped-def]
        x = x if strictly_last(x) else x.contiguous()
        y, mean = torch.empty_like(x), x.new_empty(x.shape[1])
        inverse = torch.empty_like(mean)
        norms = (mean, inverse, *running)
        call("sw_norm_forward", x, _images(x), x, weight, bias, *norms, eps, relu, y)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.eps, ctx.relu = eps, relu
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # second derivatives are asked for: those of torch's operators
            return *_differentiable(ctx, dy), None, None, None
        x, weight, bias, mean, _ = saved = ctx.saved_tensors
        dy = dy.resolve_neg().contiguous(memory_format=memory_format(strictly_last(x)))
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        call("sw_norm_backward", x, _images(x), dy, *saved, ctx.relu, dx, dweight, dbias)
        wanted = zip((weight, bias), (dweight, dbias), strict=True)
        return dx, *(None if t is None else d for t, d in wanted), None, None, None


def _differentiable(ctx, dy):  # type: ignore[no-untyped-def]
    inputs = x, weight, bias = ctx.saved_tensors[:3]
    out = functional.batch_norm(x, None, None, weight, bias, True, 0.0, ctx.eps)
    out = functional.relu(out) if ctx.relu else out
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, dy, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def kept_statistics(norm: nn.BatchNorm2d) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mean and variance that a norm keeps of all batches, if it does."""
    return (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)


def momentum_of(norm: nn.BatchNorm2d) -> float | None:
    """How much a batch counts in them; None where that differs from batch to batch."""
    return norm.momentum if norm.track_running_stats else 0.0


class FusedBatchNorm2d(torch.nn.BatchNorm2d):
    """Batch norm and, if `relu`, the ReLU after it; what it cannot do is left to torch."""

    relu = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kept, momentum = kept_statistics(self), momentum_of(self)
        if (
            not self.training
            or momentum is None
            or not usable(input, self.weight, self.bias, *kept)
            or input.numel() == input.shape[1]
        ):
            y = super().forward(input)
            return applied(functional.relu(y)) if self.relu else y
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        running = (*kept, momentum)
        y = NativeBatchNorm.apply(input, self.weight, self.bias, running, self.eps, self.relu)
        return applied(y) if self.relu else y  # type: ignore[arg-type, return-value]


class Windows(ctypes.Structure):
    """A pooling as the library reads it."""

    _fields_ = int64s(
        *("n", "c", "h", "w", "p", "q", "r", "s"),
        *("stride_h", "stride_w", "pad_h", "pad_w", "threads"),
    )


class Pooling(NamedTuple):
    """What a pooling does, as torch names it."""

    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    ceil_mode: bool

    def out(self, size: Sequence[int]) -> Sizes:
        """The windows of an image of this height and width."""
        parts = zip(size, *self[:3], strict=True)
        down, across = (_count(*part, self.ceil_mode) for part in parts)
        return down, across


class NativeMaxPool(torch.autograd.Function):
    """The largest number of every window, and its gradient."""

    @staticmethod
    def forward(ctx, x, how: Pooling):  # type: ignore[no-untyped-def]
        out = how.out(x.shape[2:])
        sizes = (*x.shape[:2], *out)
        y = torch.empty(sizes, dtype=x.dtype, memory_format=torch.channels_last)
        which = torch.empty(y.numel(), dtype=torch.uint8)
        numbers = (n for pair in how[:3] for n in pair)
        windows = Windows(*x.shape, *out, *numbers, torch.get_num_threads())
        call("sw_pool_forward", x, windows, x, y, which)
        ctx.save_for_backward(x, which)
        ctx.windows, ctx.how = windows, how
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, which = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are asked for: those of torch's operator
            y = functional.max_pool2d(x, **ctx.how._asdict())
            return *torch.autograd.grad(y, x, dy, create_graph=True), None
        dy = dy.resolve_neg().contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        call("sw_pool_backward", x, ctx.windows, dy, which, dx)
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
        how = Pooling(*(per_dim(size, 2) for size in sizes), ceil_mode=self.ceil_mode)
        # A window with dilation may have no pixel at all.
        if self.return_indices or per_dim(self.dilation, 2) != (1, 1) or not _takes(input, how):
            return super().forward(input)  # type: ignore[return-value]
        return NativeMaxPool.apply(input, how)  # type: ignore[return-value]


def _takes(x: torch.Tensor, how: Pooling) -> bool:
    """What torch refuses is left to it too: it says why."""
    if not usable(x) or not strictly_last(x) or how.kernel_size[0] * how.kernel_size[1] > 256:
        return False
    padded = all(2 * pad <= k for k, pad in zip(how.kernel_size, how.padding, strict=True))
    return padded and min(how.out(x.shape[2:])) > 0


OWN: dict[type, type[nn.Module]] = {nn.BatchNorm2d: FusedBatchNorm2d, nn.MaxPool2d: FastMaxPool2d}


def adopt(layer: nn.Module, x: torch.Tensor, tuner: Tuner, relu: bool) -> None:
    """Makes a layer run on our kernel if that trains it, and the ReLU that follows, faster."""
    own = OWN.get(type(layer))
    known = x.ndim == 4 and x.dtype in PRECISIONS and x.device.type == "cpu" and x.numel() > 0
    if own is None or not known:
        return
    last, sizes = strictly_last(x), "x".join(map(str, x.shape))
    key = f"{own.__name__}({layer.extra_repr()}) {sizes} {last} {PRECISIONS[x.dtype]} {relu}"
    times = tuner.winners.seconds.setdefault(key, {}).setdefault("step", {})
    if not times.keys() >= {STOCK, own.__name__}:
        times.update(interleaved(_steps(layer, own, x, last, relu)))
        tuner.winners.save()
    if times[own.__name__] <= MARGIN * times[STOCK]:
        layer.__class__ = own


def _steps(
    layer: nn.Module, own: type[nn.Module], like: torch.Tensor, last: bool, relu: bool
) -> dict[str, Callable[[], object]]:
    """Forward and backward of copies of the layer, in training, on random numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(like.shape, dtype=like.dtype, memory_format=memory_format(last))
    x.normal_(generator=generator).requires_grad_()
    stock, fast = (copy.deepcopy(layer).train() for _ in range(2))
    fast.__class__ = own
    if relu:
        stock, fast.relu = nn.Sequential(stock, nn.ReLU(inplace=True)), True  # type: ignore[assignment]

    def step(one: nn.Module) -> Callable[[], object]:
        def run() -> None:
            with torch.enable_grad():
                y = one(x)
                torch.autograd.grad(y, x, torch.ones_like(y))

        return run

    return {STOCK: step(stock), own.__name__: step(fast)}
