"""Max pooling of channels-last images: what torch's own gives, forward and backward."""

from __future__ import annotations

import random

import pytest
import torch

from convolutions import ISAS, SEED, chosen
from images import check_pool, compare_pools
from shardwise.kernels import native
from shardwise.kernels.timed_layers import FastMaxPool2d, NativeMaxPool

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.mark.parametrize("isa", ISAS)
def test_it_equals_torch_on_random_windows(isa: str) -> None:
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    with chosen(SHARDWISE_ISA=isa):
        for _ in range(100):
            check_pool(rng)


@pytest.mark.parametrize("isa", ISAS)
def test_equal_numbers_and_nans_go_to_the_tap_that_torch_takes(isa: str) -> None:
    torch.manual_seed(0)
    values = torch.randint(-2, 3, (2, 18, 7, 6)).float()
    values[0, :, 2, 3] = float("nan")
    values[1, :, 4] = float("-inf")
    x = values.contiguous(memory_format=torch.channels_last).requires_grad_()
    with chosen(SHARDWISE_ISA=isa):
        compare_pools(x, {"kernel_size": 3, "stride": 1, "padding": 1})
        compare_pools(x, {"kernel_size": 3, "stride": 2, "ceil_mode": True})


def test_the_kernel_runs_where_it_can_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.Size] = []
    apply = NativeMaxPool.apply
    monkeypatch.setattr(
        NativeMaxPool, "apply", lambda x, *rest: ran.append(x.shape) or apply(x, *rest)
    )
    pool, x = FastMaxPool2d(2), torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(pool(x), torch.nn.functional.max_pool2d(x, 2))
    assert not ran  # planar
    assert pool(x.contiguous(memory_format=torch.channels_last)).shape == (2, 3, 2, 3) and ran
    assert pool(torch.randn(3, 4, 6)).shape == (3, 2, 3) and len(ran) == 1
    assert pool(torch.randn(0, 3, 4, 6)).shape == (0, 3, 2, 3) and len(ran) == 1
    wide = x.contiguous(memory_format=torch.channels_last)
    assert FastMaxPool2d(2, dilation=2)(wide).shape == (2, 3, 1, 2) and len(ran) == 1
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        FastMaxPool2d(2, padding=2)(wide)


def test_gradients_of_second_order_are_right() -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    assert torch.autograd.gradcheck(FastMaxPool2d(2, ceil_mode=True), x)
    assert torch.autograd.gradgradcheck(FastMaxPool2d(2, ceil_mode=True), x)
