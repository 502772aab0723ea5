"""NaNs and infinities leave every kernel, and every ReLU inside a kernel, as they leave torch's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from convolutions import ISAS, chosen
from images import fused
from shardwise.kernels import conv
from shardwise.kernels.conv_shape import memory_format
from shardwise.kernels.dispatch import INEXACT, KERNELS

IMAGES = ((math.nan, math.inf, -math.inf), (math.inf,))  # what each image has one of
DTYPES = (torch.float32, torch.float64)

pytestmark = pytest.mark.skipif(not ISAS, reason="no native kernels here")
both_layouts = pytest.mark.parametrize("last", [False, True], ids=["planar", "channels last"])


@pytest.fixture(autouse=True, params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with chosen(SHARDWISE_ISA=request.param):
        yield


def put(values: tuple[float, ...], into: torch.Tensor) -> None:
    """One into a pixel of each of the first images; the last one has none."""
    for image, value in enumerate(values):
        into[image, 1, 4, 5] = value


def case(kernel: str, last: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """x, w, bias and groups that the kernel takes."""
    torch.manual_seed(0)
    c, groups = {"depthwise": (20, 20), "direct": (3, 1)}.get(kernel, (20, 1))
    x = torch.randn(4, c, 9, 10, dtype=dtype).contiguous(memory_format=memory_format(last))
    w = torch.randn(20, c // groups, 3, 3, dtype=dtype)
    return [t.requires_grad_() for t in (x, w, torch.randn(20, dtype=dtype))], groups


def stock(inputs: list[torch.Tensor], groups: int, relu: bool) -> torch.Tensor:
    y = functional.conv2d(*inputs, padding=1, groups=groups)
    return y.relu() if relu else y


def assert_same(ours: torch.Tensor, truth: torch.Tensor, kernel: str) -> None:
    """The same numbers at the same places.

    Winograd's tiles share sums: there, what is not finite for torch is not finite, and the image
    that has nothing special is right.
    """
    if kernel in INEXACT:
        assert not ours[~truth.isfinite()].isfinite().any()
        ours, truth = (ours[-1], truth[-1]) if truth[-1].isfinite().all() else (truth, truth)
    loose = 1e-3 if ours.dtype == torch.float32 else 1e-10
    torch.testing.assert_close(ours, truth, rtol=loose, atol=loose, equal_nan=True)


def dtypes_of(kernel: str) -> tuple[torch.dtype, ...]:
    return DTYPES[:1] if kernel in INEXACT else DTYPES


@both_layouts
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kernel", KERNELS["fwd"])
def test_forward(kernel: str, relu: bool, last: bool) -> None:
    for dtype in dtypes_of(kernel):
        inputs, groups = case(kernel, last, dtype)
        with torch.no_grad():
            put(IMAGES[0], inputs[0])
            ours = conv(*inputs, padding=1, groups=groups, fwd=kernel, relu=relu)
            truth = stock(inputs, groups, relu)
        assert truth[0].isnan().any() and truth[1].isinf().any() and truth[3].isfinite().all()
        assert_same(ours, truth, kernel)


@both_layouts
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("kernel", "direction"), [(k, d) for d in ("dx", "dw") for k in KERNELS[d]]
)
def test_backward(kernel: str, direction: str, relu: bool, last: bool) -> None:
    """After a forward pass of torch's, so that only the backward kernel is tested."""
    names = {"dx": "stock", "dw": "stock", direction: kernel}
    for dtype in dtypes_of(kernel):
        for values, into in product(IMAGES, ("x", "dy")):
            inputs, groups = case(kernel, last, dtype)
            dy = torch.randn_like(stock(inputs, groups, relu))
            put(values, inputs[0].data if into == "x" else dy)
            y = conv(*inputs, padding=1, groups=groups, fwd="stock", relu=relu, **names)
            ours = torch.autograd.grad(y, inputs, dy)
            truth = torch.autograd.grad(stock(inputs, groups, relu), inputs, dy)
            for a, b in zip(ours, truth, strict=True):
                assert_same(a, b, kernel)


@both_layouts
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kernel", ["depthwise", "winograd2", "winograd4"])
def test_a_fused_relu_lets_the_error_of_a_nan_pass(kernel: str, relu: bool, last: bool) -> None:
    inputs, groups = case(kernel, last, torch.float32)
    with torch.no_grad():
        inputs[2].fill_(math.nan)
    y = conv(*inputs, padding=1, groups=groups, fwd=kernel, relu=relu)
    assert y.isnan().all()
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, inputs[2], dy)[0], dy.sum((0, 2, 3)))


def images(last: bool, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 20, 9, 10, dtype=dtype).contiguous(memory_format=memory_format(last))


def results(norm: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, every gradient and the statistics."""
    x = x.detach().requires_grad_()
    y = norm(x)
    return [y, *torch.autograd.grad(y, [x, *norm.parameters()], dy), *norm.buffers()]


@both_layouts
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("into", ["x", "first x", "dy", "bias"])
def test_batch_norm(into: str, relu: bool, last: bool) -> None:
    for dtype, special in product(DTYPES, IMAGES[0]):
        x, norm = images(last, dtype), nn.BatchNorm2d(20, dtype=dtype)
        dy = torch.randn_like(x)
        places = {"x": x[0, :, 4, 5], "first x": x[0, :, 0, 0], "dy": dy[0, :, 4, 5]}
        places |= {"bias": norm.bias.data}
        places[into][3] = special
        ours = results(fused(norm, relu), x, dy)
        truth = results(nn.Sequential(norm, nn.ReLU()) if relu else norm, x, dy)
        loose = 2e-4 if dtype == torch.float32 else 1e-9
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=loose, atol=loose, equal_nan=True)


@both_layouts
def test_batch_norm_of_numbers_whose_squares_float32_cannot_hold(last: bool) -> None:
    x, norm = images(last, torch.float32), nn.BatchNorm2d(20)
    x[0, 3, 4, 5], dy = 1e30, torch.randn_like(x)
    ours = results(fused(norm, False), x, dy)[0]
    torch.testing.assert_close(ours.double(), norm.double()(x.double()), rtol=1e-4, atol=1e-4)
