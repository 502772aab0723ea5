"""Batch norm, ReLU and a pointwise convolution in one pass, as DenseNets have them in a row.

What is normalised is made where the convolution's products need it, in the backward pass again: it
is never written, and not kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from shardwise.kernels.conv_shape import PRECISIONS, ConvShape, strictly_last
from shardwise.kernels.dispatch import STOCK
from shardwise.kernels.ops import autocasts
from shardwise.kernels.timed_layers import (
    AppliedReLU,
    FusedBatchNorm2d,
    call,
    kept_statistics,
    momentum_of,
    usable,
)
from shardwise.kernels.tuner import MARGIN, Tuner, interleaved

NORMS, RELUS = (nn.BatchNorm2d, FusedBatchNorm2d), (nn.ReLU, AppliedReLU)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NativeNormConv(torch.autograd.Function):
    """conv(relu(norm(x))); `running` is the mean and variance that the norm keeps, its momentum."""

    @staticmethod
    def forward(ctx, x, weight, bias, w, conv_bias, running, eps: float):  # type: ignore[no-untyped-def]
        shape = ConvShape(tuple(x.shape), tuple(w.shape), last=True, dtype=PRECISIONS[x.dtype])
        y = torch.empty(shape.out, dtype=x.dtype, memory_format=torch.channels_last)
        mean, inverse = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        norm = (weight, bias, mean, inverse, *running, eps)
        problem = shape.problem(torch.get_num_threads())
        call("sw_norm_conv_forward", x, problem, x, *norm, w, conv_bias, y)
        ctx.save_for_backward(x, weight, bias, w, conv_bias, mean, inverse)
        ctx.shape, ctx.eps = shape, eps
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # second derivatives are asked for: those of torch's operators
            return *_differentiable(ctx, dy), None, None
        x, weight, bias, w, conv_bias, mean, inverse = ctx.saved_tensors
        dy = dy.resolve_neg().contiguous(memory_format=torch.channels_last)
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        dw = torch.empty_like(w) if ctx.needs_input_grad[3] else None
        norm = (x, weight, bias, mean, inverse)
        problem = ctx.shape.problem(torch.get_num_threads())
        call("sw_norm_conv_backward", x, problem, dy, *norm, w, dx, dweight, dbias, dw)
        added = dy.sum((0, 2, 3)) if conv_bias is not None else None
        wanted = zip((weight, bias), (dweight, dbias), strict=True)
        return dx, *(None if t is None else d for t, d in wanted), dw, added, None, None


def _differentiable(ctx, dy):  # type: ignore[no-untyped-def]
    inputs = x, weight, bias, w, conv_bias = ctx.saved_tensors[:5]
    normed = functional.batch_norm(x, None, None, weight, bias, True, 0.0, ctx.eps)
    out = functional.conv2d(functional.relu(normed), w, conv_bias)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, dy, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def norm_conv(norm: nn.BatchNorm2d, conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """conv(relu(norm(x))), where `takes` says that it is possible."""
    running = (*kept_statistics(norm), momentum_of(norm))
    if norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    parameters = (norm.weight, norm.bias, conv.weight, conv.bias)
    return NativeNormConv.apply(x, *parameters, running, norm.eps)  # type: ignore[return-value]


def pointwise(conv: nn.Module) -> bool:
    """Whether a layer is a convolution of single pixels."""
    if not isinstance(conv, nn.Conv2d) or conv.kernel_size != (1, 1) or conv.groups != 1:
        return False
    return conv.stride == (1, 1) and conv.padding == (0, 0) and not getattr(conv, "relu", False)


def in_a_row(modules: list[nn.Module], at: int) -> bool:
    """Whether batch norm, ReLU and a pointwise convolution begin here, and nobody watches them."""
    three = modules[at : at + 3]
    if len(three) < 3 or type(three[0]) not in NORMS or type(three[1]) not in RELUS:
        return False
    watched = any(getattr(module, hooks) for module in three for hooks in HOOKS)
    changed = any("forward" in vars(module) for module in three)
    return pointwise(three[2]) and not watched and not changed


def takes(norm: nn.BatchNorm2d, conv: nn.Conv2d, x: torch.Tensor) -> bool:
    """Whether the kernel computes this; else the three layers do, one after the other."""
    tensors = (norm.weight, norm.bias, *kept_statistics(norm), conv.weight, conv.bias)
    simple = norm.training and momentum_of(norm) is not None and not _has_any_global_hook()
    fits = usable(x, *tensors) and strictly_last(x) and x.shape[1] == conv.in_channels
    own = (
        norm.num_features == x.shape[1] and x.numel() > x.shape[1]
    )  # else torch says what is wrong
    return simple and fits and own and not autocasts(x)


class FusedSequential(nn.Sequential):
    """A sequence whose convolutions with `after_norm` take the norm and ReLU before them along."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        modules, at = list(self), 0
        while at < len(modules):
            if in_a_row(modules, at) and getattr(modules[at + 2], "after_norm", False):
                norm, _, conv = modules[at : at + 3]
                if takes(norm, conv, input):  # type: ignore[arg-type]
                    input = norm_conv(norm, conv, input)  # type: ignore[arg-type]
                    at += 3
                    continue
            input = modules[at](input)
            at += 1
        return input


def rows_of(model: nn.Module) -> dict[str, tuple[nn.Sequential, int]]:
    """By the name of its norm, where norm, ReLU and pointwise convolution lie in a sequence."""
    return {
        f"{name}.{key}" if name else key: (sequence, at)
        for name, sequence in model.named_modules()
        if isinstance(sequence, nn.Sequential)
        if type(sequence) in (nn.Sequential, FusedSequential)
        for at, key in enumerate(sequence._modules)
        if in_a_row(list(sequence), at)
    }


def adopt_row(sequence: nn.Sequential, at: int, x: torch.Tensor, tuner: Tuner) -> None:
    """Makes three layers of a sequence run as one if that trains them faster."""
    norm, relu, conv = list(sequence)[at : at + 3]
    assert isinstance(norm, nn.BatchNorm2d) and isinstance(conv, nn.Conv2d)
    if not strictly_last(x) or x.dtype not in PRECISIONS or not usable(x):
        return
    sizes = f"{'x'.join(map(str, x.shape))} {conv.out_channels}"
    times = tuner.winners.seconds.setdefault(
        f"norm_conv {sizes} {norm.affine} {PRECISIONS[x.dtype]}", {}
    ).setdefault("step", {})
    if not times.keys() >= {STOCK, "norm_conv"}:
        times.update(interleaved(_steps((norm, relu, conv), x)))
        tuner.winners.save()
    if times["norm_conv"] <= MARGIN * times[STOCK]:
        conv.after_norm = True  # type: ignore[assignment]
        sequence.__class__ = FusedSequential


def _steps(layers: tuple[nn.Module, ...], like: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Forward and backward of copies of the layers, in training, as they are now and as one."""
    x = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=like.dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    row, one = (nn.Sequential(*copy.deepcopy(layers)).train() for _ in range(2))
    one.__class__, one[2].after_norm = FusedSequential, True  # type: ignore[assignment]

    def step(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.enable_grad():
                y = model(x)
                torch.autograd.grad(y, (x, *model.parameters()), torch.ones_like(y))

        return run

    return {STOCK: step(row), "norm_conv": step(one)}
