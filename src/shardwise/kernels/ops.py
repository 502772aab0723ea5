"""Convolutions as operators of torch: autograd, export and compile work on them.

    shardwise.conv(x, w, bias, stride=2, padding=1, fwd="convgemm", dx="deconvgemm", dw="stock")

Each direction has its own kernel. The gradients are operators too, with gradients of their own.
Where nothing is traced, `convolve` goes around torch's dispatcher, which takes longer than a small
convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.kernels import dispatch
from shardwise.kernels.conv_shape import (
    channels_last,
    is_eager,
    memory_format,
    num_windows,
    per_dim,
)
from shardwise.kernels.dispatch import STOCK, KernelChoice, Settings, kernels_for

_TAIL = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str fwd, str dx, str dw"
)
_ops = torch.library.Library("shardwise", "DEF")
_ops.define(f"conv(Tensor x, Tensor w, Tensor? bias, {_TAIL}, bool relu) -> Tensor")
_ops.define(f"conv_dx(Tensor dy, Tensor x, Tensor w, {_TAIL}) -> Tensor")
_ops.define(f"conv_dw(Tensor dy, Tensor x, Tensor w, {_TAIL}) -> Tensor")

# By the dimensions of w; autocast does not know torch.convolution.
STOCK_OF = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}
FWD, DX, DW = 4, 5, 6  # where the kernels' names are in the tail
Tail = tuple[Any, ...]


def conv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    fwd: str = "convgemm",
    dx: str = "convgemm",
    dw: str = "convgemm_trans",
    relu: bool = False,
) -> torch.Tensor:
    """A 1-D, 2-D or 3-D convolution, each of its three directions by the kernel that is named.

    A kernel that does not take the shape, the precision or the device gives way to another.

    >>> conv(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)).item()
    9.0
    """
    for direction, name in (("fwd", fwd), ("dx", dx), ("dw", dw)):
        if name not in kernels_for(direction):
            known = ", ".join(kernels_for(direction))
            raise ValueError(f"{direction}={name!r} is no kernel; choose from {known}")
    stride, padding, dilation = (per_dim(v, w.ndim - 2) for v in (stride, padding, dilation))
    return convolve(
        x, w, bias, (stride, padding, dilation, groups), KernelChoice(fwd, dx, dw), relu
    )


def _settings(tail: Tail) -> Settings:
    stride, padding, dilation, groups = tail[:4]
    return tuple(stride), tuple(padding), tuple(dilation), groups


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Settings,
    choice: KernelChoice,
    relu: bool,
) -> torch.Tensor:
    """The operator, or the same without the dispatcher where that does.

    torch.func's transforms know neither, and autocast computes in 16 bits: they get the stock
    operator.
    """
    if torch._C._are_functorch_transforms_active() or autocasts(x):
        y = STOCK_OF[w.ndim](x, w, bias, *settings)
        return y.relu() if relu else y
    if is_eager(x, w, bias):
        return Convolution.apply(x, w, bias, settings, choice, relu)  # type: ignore[return-value]
    return torch.ops.shardwise.conv(
        x, w, bias, *map(list, settings[:3]), settings[3], *choice, relu
    )


def autocasts(x: torch.Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


class Convolution(torch.autograd.Function):
    """A convolution of plain tensors; second derivatives are those of the operators."""

    @staticmethod
    def forward(ctx, x, w, bias, settings: Settings, choice: KernelChoice, relu: bool):  # type: ignore[no-untyped-def]
        y = dispatch.forward(x, w, bias, settings, choice.fwd, relu)
        ctx.save_for_backward(x, w, *([y] if relu else []))
        ctx.settings, ctx.choice, ctx.tail = settings, choice, (*settings, *choice)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            return *_conv_gradients(ctx, dy)[:3], None, None, None
        (x, w, *y), settings, choice = ctx.saved_tensors, ctx.settings, ctx.choice
        needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
        dy = torch.ops.aten.threshold_backward(dy, y[0], 0) if y else dy
        if needs_x and needs_w and choice.dx == choice.dw == STOCK:  # it shares work between them
            dx, dw = dispatch.stock_backward(dy, x, w, settings, (True, True))
        else:
            dx = dispatch.backward("dx", dy, x, w, settings, choice.dx) if needs_x else None
            dw = dispatch.backward("dw", dy, x, w, settings, choice.dw) if needs_w else None
        return dx, dw, _of_bias(dy) if needs_bias else None, None, None, None


def _of_bias(dy: torch.Tensor) -> torch.Tensor:
    return dy.sum((0, *range(2, dy.ndim)))


# -- what the operators compute --------------------------------------------------------------------


def _conv(x, w, bias, *tail):  # type: ignore[no-untyped-def]
    return dispatch.forward(x, w, bias, _settings(tail), tail[FWD], relu=tail[7])


def _gradient(direction: str, place: int) -> Callable[..., torch.Tensor]:
    """The operator of one gradient, by the kernel that the tail names there."""
    return lambda dy, x, w, *tail: dispatch.backward(
        direction, dy, x, w, _settings(tail), tail[place]
    )


_COMPUTED = {"conv": _conv, "conv_dx": _gradient("dx", DX), "conv_dw": _gradient("dw", DW)}
for _name, _function in _COMPUTED.items():
    _ops.impl(_name, _function, "CompositeExplicitAutograd")


# -- their shapes, for export and compile ----------------------------------------------------------


@torch.library.register_fake("shardwise::conv")
def _fake_conv(x, w, bias, stride, padding, dilation, groups, *_rest):  # type: ignore[no-untyped-def]
    sizes = num_windows(x.shape[2:], w.shape[2:], stride, padding, dilation)
    form = memory_format(channels_last(x, w), x.ndim)
    return torch.empty(
        (x.shape[0], w.shape[0], *sizes), dtype=x.dtype, device=x.device, memory_format=form
    )


@torch.library.register_fake("shardwise::conv_dx")
def _fake_dx(dy, x, w, *_tail):  # type: ignore[no-untyped-def]
    form = memory_format(channels_last(x, w), x.ndim)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=form)


@torch.library.register_fake("shardwise::conv_dw")
def _fake_dw(dy, x, w, *_tail):  # type: ignore[no-untyped-def]
    return torch.empty_like(w, memory_format=torch.preserve_format)


# -- their gradients: a convolution is linear in x and in w ----------------------------------------


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, w, _, *tail = inputs
    relu = tail[7]
    ctx.save_for_backward(x, w, *([output] if relu else []))
    ctx.tail = tail[:7]


def _conv_gradients(ctx, dy):  # type: ignore[no-untyped-def]
    x, w, *y = ctx.saved_tensors
    if y:
        dy = torch.ops.aten.threshold_backward(dy, y[0], 0)
    ops = torch.ops.shardwise
    dx = ops.conv_dx(dy, x, w, *ctx.tail) if ctx.needs_input_grad[0] else None
    dw = ops.conv_dw(dy, x, w, *ctx.tail) if ctx.needs_input_grad[1] else None
    db = _of_bias(dy) if ctx.needs_input_grad[2] else None
    return dx, dw, db, *[None] * 8


def _keep_all(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:3])
    ctx.tail = inputs[3:]


def _dx_gradients(ctx, ddx):  # type: ignore[no-untyped-def]
    """dx is linear in dy and in w; the values of x do not matter."""
    dy, _, w = ctx.saved_tensors
    ops = torch.ops.shardwise
    of_dy = ops.conv(ddx, w, None, *ctx.tail, False) if ctx.needs_input_grad[0] else None
    of_w = ops.conv_dw(dy, ddx, w, *ctx.tail) if ctx.needs_input_grad[2] else None
    return of_dy, None, of_w, *[None] * 7


def _dw_gradients(ctx, ddw):  # type: ignore[no-untyped-def]
    """dw is linear in dy and in x; the values of w do not matter."""
    dy, x, _ = ctx.saved_tensors
    ops = torch.ops.shardwise
    of_dy = ops.conv(x, ddw, None, *ctx.tail, False) if ctx.needs_input_grad[0] else None
    of_x = ops.conv_dx(dy, x, ddw, *ctx.tail) if ctx.needs_input_grad[1] else None
    return of_dy, of_x, None, *[None] * 7


torch.library.register_autograd("shardwise::conv", _conv_gradients, setup_context=_keep)
torch.library.register_autograd("shardwise::conv_dx", _dx_gradients, setup_context=_keep_all)
torch.library.register_autograd("shardwise::conv_dw", _dw_gradients, setup_context=_keep_all)
