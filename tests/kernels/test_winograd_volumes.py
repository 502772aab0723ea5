"""Winograd's kernels on volumes: torch's convolution in float64 says what is right."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from convolutions import ISAS, WINOGRAD_GROWTH, chosen, rounding
from shardwise.kernels import conv
from shardwise.kernels.conv_shape import ConvShape, memory_format
from shardwise.kernels.dispatch import INEXACT, workspace_bytes
from shardwise.kernels.native import DIRECTIONS

# x, w and padding: sizes that no tile divides, every depth of window, less and more than it needs.
CASES = [
    ((2, 5, 7, 9, 11), (17, 5, 3, 3, 3), (1, 1, 1)),
    ((1, 33, 5, 13, 6), (20, 33, 1, 3, 3), (0, 1, 1)),
    ((3, 16, 6, 10, 10), (16, 16, 3, 3, 3), (0, 0, 0)),
    ((2, 1, 4, 5, 19), (3, 1, 5, 3, 3), (2, 2, 0)),
    ((1, 40, 3, 8, 8), (65, 40, 2, 3, 3), (3, 1, 2)),
]
SIZES, WINDOW, ONES = (3, 20, 9, 10, 11), (20, 20, 3, 3, 3), (1, 1, 1)

pytestmark = pytest.mark.skipif(not ISAS, reason="no native kernels here")
both_layouts = pytest.mark.parametrize("last", [False, True], ids=["planar", "channels last"])
each_kernel = pytest.mark.parametrize("kernel", INEXACT)


@pytest.fixture(autouse=True, params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with chosen(SHARDWISE_ISA=request.param):
        yield


def volumes(x: tuple[int, ...], w: tuple[int, ...], last: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    form = memory_format(last, 5)
    tensors = (torch.randn(x).contiguous(memory_format=form), torch.randn(w), torch.randn(w[0]))
    return [t.requires_grad_() for t in tensors]


def ours(kernel: str, inputs: list[torch.Tensor], padding: tuple[int, ...]) -> torch.Tensor:
    return conv(*inputs, padding=padding, fwd=kernel, dx=kernel, dw=kernel)


def results(y: torch.Tensor, inputs: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


@each_kernel
@both_layouts
@pytest.mark.parametrize(("x", "w", "padding"), CASES, ids=str)
def test_every_direction_is_torchs_in_float64(
    x: tuple[int, ...], w: tuple[int, ...], padding: tuple[int, ...], last: bool, kernel: str
) -> None:
    shape = ConvShape(x, w, (1, 1, 1), padding, last=last)
    assert all(workspace_bytes(kernel, d, shape, 1) >= 0 for d in DIRECTIONS)  # no other steps in
    inputs, dy = volumes(x, w, last), torch.randn(shape.out)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    truths = results(functional.conv3d(*doubles, padding=padding), doubles, dy)
    found = results(ours(kernel, inputs, padding), inputs, dy)
    sizes = [t.detach().abs().requires_grad_() for t in doubles]
    scales = results(functional.conv3d(*sizes, padding=padding), sizes, dy.abs())
    for direction, got, truth, scale in zip(DIRECTIONS, found, truths, scales, strict=False):
        limit = rounding(shape, direction) * WINOGRAD_GROWTH[kernel] * scale.max()
        assert (got.double() - truth).abs().max() <= limit


@each_kernel
@pytest.mark.parametrize(
    ("dtype", "stride", "groups"),
    [("float64", 1, 1), ("float32", 2, 1), ("float32", 1, 2)],
)
def test_what_they_do_not_take_is_left_to_others(
    kernel: str, dtype: str, stride: int, groups: int
) -> None:
    shape = ConvShape(
        (1, 4, 6, 6, 6), (4, 4 // groups, 3, 3, 3), (stride,) * 3, ONES, groups=groups, dtype=dtype
    )
    assert all(workspace_bytes(kernel, d, shape, 1) < 0 for d in DIRECTIONS)


@each_kernel
@both_layouts
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("into", ["x", "dy"])
def test_what_is_not_finite_stays_so_and_spreads_only_inside_slices(
    into: str, special: float, last: bool, kernel: str
) -> None:
    """A tile's sums are shared, so all of it may be lost; slices out of a window's reach are not.

    An infinity may become a NaN.
    """
    inputs = volumes(SIZES, WINDOW, last)
    dy = torch.randn(SIZES)
    (inputs[0].data if into == "x" else dy)[0, 1, 4, 5, 6] = special
    found = results(ours(kernel, inputs, ONES), inputs, dy)
    truths = results(functional.conv3d(*inputs, padding=ONES), inputs, dy)
    for got, truth in zip(found, truths, strict=True):
        assert not got[~truth.isfinite()].isfinite().any()
    reached = {"x": 0, "dy": 1}[into]  # y by x, dx by dy
    for got, truth in zip(found[:2], truths[:2], strict=True):
        torch.testing.assert_close(got[1:], truth[1:], rtol=1e-3, atol=1e-3)
        far = [0, 1, 2, 6, 7, 8]
        torch.testing.assert_close(got[0][:, far], truth[0][:, far], rtol=1e-3, atol=1e-3)
    other = 1 - reached
    torch.testing.assert_close(found[other], truths[other], rtol=1e-3, atol=1e-3)


@each_kernel
def test_a_filter_that_is_not_finite_loses_its_own_channel_only(kernel: str) -> None:
    inputs = volumes(SIZES, WINDOW, False)
    inputs[1].data[3, 2, 1, 1, 1] = math.nan
    with torch.no_grad():
        y, truth = ours(kernel, inputs, ONES), functional.conv3d(*inputs, padding=ONES)
    assert y[:, 3].isnan().all() and truth[:, 3].isnan().any()
    rest = [f for f in range(20) if f != 3]
    torch.testing.assert_close(y[:, rest], truth[:, rest], rtol=1e-3, atol=1e-3)
