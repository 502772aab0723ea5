"""Runs one direction of a convolution with the kernel asked for, or with one that can do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from shardwise.kernels.conv_shape import ConvShape, Sizes, memory_format, shape_of
from shardwise.kernels.native import DIRECTIONS, DONE, library

STOCK = "stock"
# By direction, those with small workspaces last: what to try when memory is short.
KERNELS: dict[str, tuple[str, ...]] = {
    "fwd": ("winograd4", "winograd2", "base", "direct", "depthwise", "convgemm"),
    "dx": ("winograd4", "winograd2", "base", "depthwise", "convgemm", "deconvgemm"),
    "dw": (
        *("winograd4", "winograd2", "base", "reindex", "direct", "depthwise", "tapwise"),
        "convgemm_trans",
    ),
}
INEXACT = ("winograd2", "winograd4")  # more rounding than a plain sum of products

persistent = True  # P1's PM: workspaces stay allocated between calls

Settings = tuple[Sizes, Sizes, Sizes, int]  # stride, padding, dilation, groups


class KernelChoice(NamedTuple):
    """The kernel of each direction."""

    fwd: str = STOCK
    dx: str = STOCK
    dw: str = STOCK

    @property
    def stock(self) -> bool:
        return self == (STOCK, STOCK, STOCK)


def kernels_for(direction: str) -> tuple[str, ...]:
    """Every kernel of a direction, the stock operator first."""
    return (STOCK, *KERNELS[direction])


def workspace_bytes(kernel: str, direction: str, shape: ConvShape, threads: int) -> int:
    """What a kernel takes from the arena, or -1 if it does not take this shape."""
    lib = library()
    if lib is None or kernel == STOCK:
        return 0 if kernel == STOCK else -1
    return lib.workspace(kernel, direction, shape.dtype == "float64", shape.problem(threads))


def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Settings,
    kernel: str,
    relu: bool = False,
) -> torch.Tensor:
    """y, with the bias added and, if asked for, negative numbers set to 0."""

    def stock() -> torch.Tensor:
        y = torch.convolution(x, w, bias, *settings[:3], False, [0], settings[3])
        return y.relu_() if relu else y

    shape = shape_of(x, w, *settings)
    if shape is None or not _same(x, bias):
        return stock()
    added = None if bias is None else bias.contiguous()
    tensors = (_dense(x, shape.last), _dense(w, shape.filter_last), None, added)
    return _run("fwd", kernel, shape, tensors, shape.out, stock, relu)


def backward(
    direction: str,
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    settings: Settings,
    kernel: str,
) -> torch.Tensor:
    """dx, for which only the shape of x counts, or dw, for which only that of w does."""
    data = direction == "dx"

    def stock() -> torch.Tensor:
        return stock_backward(dy, x, w, settings, (data, not data))[0 if data else 1]

    shape = shape_of(x, w, *settings)
    if shape is None or not _same(x, dy):
        return stock()
    factors = (None, _dense(w, shape.filter_last)) if data else (_dense(x, shape.last), None)
    tensors = (*factors, _dense(dy, shape.last), None)
    return _run(direction, kernel, shape, tensors, shape.x if data else shape.w, stock)


def _run(
    direction: str,
    kernel: str,
    shape: ConvShape,
    tensors: tuple[torch.Tensor | None, ...],
    out_shape: tuple[int, ...],
    stock: Callable[[], torch.Tensor],
    relu: bool = False,
) -> torch.Tensor:
    """The kernel; where it cannot, a smaller one of ours; at last the stock operator."""
    lib = library()
    if kernel == STOCK or lib is None:
        return stock()
    last = shape.filter_last if direction == "dw" else shape.last
    dtype = getattr(torch, shape.dtype)
    out = torch.empty(out_shape, dtype=dtype, memory_format=memory_format(last, len(out_shape)))
    problem = shape.problem(torch.get_num_threads(), relu)
    names = KERNELS[direction]
    if kernel not in names:
        raise ValueError(
            f"{kernel!r} is no {direction} kernel; choose from {kernels_for(direction)}"
        )
    for name in (kernel, *names[names.index(kernel) + 1 :]):
        if lib.run(name, direction, problem, tensors, out, persistent) == DONE:
            return out
    return stock()


def stock_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    settings: Settings,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dw of torch's own operator, those that are wanted."""
    stride, padding, dilation, groups = settings
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, w, None, stride, padding, dilation, False, [0], groups, [*wanted, False]
    )
    return dx, dw


def _same(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None:
        return True
    return other.dtype == x.dtype and other.device == x.device and not other.is_neg()


def _dense(t: torch.Tensor, last: bool) -> torch.Tensor:
    return t.contiguous(memory_format=memory_format(last, t.ndim))


assert set(KERNELS) == set(DIRECTIONS)
