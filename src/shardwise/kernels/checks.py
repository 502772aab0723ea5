"""Whether the stock operator computes what our kernels do, on the shape that it is chosen for.

Libraries below torch have had weight gradients that were wrong on some CPUs and shapes only.
"""

from __future__ import annotations

import warnings

import torch

from shardwise.kernels import dispatch
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import STOCK, Settings

# Of each direction, the kernel that takes every shape, by sums of products alone.
JUDGES = {"fwd": "convgemm", "dx": "deconvgemm", "dw": "convgemm_trans"}
# In units of rounding times the root of the number of terms. On 25 layers of ResNet-34, GoogLeNet
# and a 3-D U-Net, stock and ours differ by at most 2.3; with 10,000 terms in float32, 64 is an
# error of 0.0008 of the result.
LIMIT = 64.0
LEAST, MOST = 1e-30, 1e30  # what a file of times can hold


def settings(shape: ConvShape) -> Settings:
    return shape.stride, shape.padding, shape.dilation, shape.groups


def run(
    direction: str, kernel: str, shape: ConvShape, tensors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """One direction of a convolution of x, w and dy."""
    x, w, dy = tensors
    if direction == "fwd":
        return dispatch.forward(x, w, None, settings(shape), kernel)
    return dispatch.backward(direction, dy, x, w, settings(shape), kernel)


def errors(shape: ConvShape, direction: str, tensors: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """The error of the stock operator and of ours, in units of which `LIMIT` is too many.

    Where they agree that is what they differ by; where not, float64 says which of them is wrong.
    """
    judge = JUDGES[direction]
    stock, ours = (run(direction, name, shape, tensors) for name in (STOCK, judge))
    unit = _rounding(shape, direction)
    apart = _distance(stock, ours) / unit
    if apart <= LIMIT:
        return {STOCK: _storable(apart), judge: _storable(apart)}
    doubles = tuple(t.double() for t in tensors)
    truth = run(direction, judge, shape, doubles)
    found = {STOCK: _distance(stock, truth) / unit, judge: _distance(ours, truth) / unit}
    for kernel in wrong(found):
        warnings.warn(
            f"{kernel} computes a wrong {direction} here and is not used: "
            f"{found[kernel] * unit:.1g} of the result's size; {shape}",
            stacklevel=2,
        )
    return {name: _storable(error) for name, error in found.items()}


def wrong(found: dict[str, float]) -> set[str]:
    """The kernels whose errors no rounding explains.

    >>> wrong({"stock": 1e6, "convgemm": 0.5})
    {'stock'}
    """
    return {kernel for kernel, error in found.items() if not error <= LIMIT}


def _rounding(shape: ConvShape, direction: str) -> float:
    """What rounding may do, as a part of the result."""
    size = {"fwd": shape.out, "dx": shape.x, "dw": shape.w}[direction]
    terms = shape.flops / 2 / torch.Size(size).numel()
    return torch.finfo(getattr(torch, shape.dtype)).eps * max(1.0, terms) ** 0.5


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a part of the usual size of b's elements; NaN is the largest."""
    apart = (a - b).abs().max() / b.double().square().mean().sqrt().clamp(min=LEAST)
    return float(apart.nan_to_num(MOST, MOST))


def _storable(error: float) -> float:
    return min(max(error, LEAST), MOST)
