"""Max pooling of channels-last images: what torch's own gives, forward and backward."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise.kernels import native
from shardwise.kernels.pool import FastMaxPool2d, MaxPool

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def images(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, dtype=dtype)
    return values.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).requires_grad_()


def random_pooling(rng: random.Random) -> dict[str, object]:
    kernel = (rng.randint(1, 5), rng.randint(1, 5))
    return {
        "kernel_size": kernel,
        "stride": (rng.randint(1, 3), rng.randint(1, 3)),
        "padding": (rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2)),
        "dilation": (rng.randint(1, 2), rng.randint(1, 2)),
        "ceil_mode": rng.random() < 0.5,
    }


def compare(x: torch.Tensor, how: dict[str, object]) -> None:
    ours, stock = FastMaxPool2d(**how)(x), torch.nn.MaxPool2d(**how)(x)  # type: ignore[arg-type]
    assert torch.equal(ours.isnan(), stock.isnan()) and torch.equal(
        ours.nan_to_num(), stock.nan_to_num()
    ), how
    dy = torch.randn_like(stock)
    ours, stock = (torch.autograd.grad(y, x, dy)[0] for y in (ours, stock))
    torch.testing.assert_close(ours, stock, msg=lambda text: f"{how}: {text}")


def test_it_equals_torch_on_random_windows() -> None:
    rng, done, before = random.Random(0), 0, torch.get_num_threads()
    torch.manual_seed(0)
    while done < 200:
        how = random_pooling(rng)
        shape = (
            rng.randint(1, 4),
            rng.choice([2, 3, 16, 17, 40]),
            *(rng.randint(2, 19) for _ in "hw"),
        )
        x = images(shape, rng.choice([torch.float32, torch.float64]))
        reach = [1 + d * (k - 1) for k, d in zip(how["kernel_size"], how["dilation"], strict=True)]  # type: ignore
        if any(n + 2 * p < r for n, p, r in zip(shape[2:], how["padding"], reach, strict=True)):  # type: ignore
            continue
        torch.set_num_threads(rng.randint(1, 3))
        try:
            compare(x, how)
        finally:
            torch.set_num_threads(before)
        done += 1


def test_equal_numbers_and_nans_go_to_the_tap_that_torch_takes() -> None:
    torch.manual_seed(0)
    values = torch.randint(-2, 3, (2, 18, 7, 6)).float()
    values[0, :, 2, 3] = float("nan")
    values[1, :, 4] = float("-inf")
    x = values.contiguous(memory_format=torch.channels_last).requires_grad_()
    compare(x, {"kernel_size": 3, "stride": 1, "padding": 1})
    compare(x, {"kernel_size": 3, "stride": 2, "ceil_mode": True})


def test_the_kernel_runs_where_it_can_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.Size] = []
    apply = MaxPool.apply
    monkeypatch.setattr(MaxPool, "apply", lambda x, *rest: ran.append(x.shape) or apply(x, *rest))
    pool, x = FastMaxPool2d(2), torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(pool(x), torch.nn.functional.max_pool2d(x, 2))
    assert not ran  # planar
    assert pool(x.contiguous(memory_format=torch.channels_last)).shape == (2, 3, 2, 3) and ran
    assert pool(torch.randn(3, 4, 6)).shape == (3, 2, 3) and len(ran) == 1
    assert pool(torch.randn(0, 3, 4, 6)).shape == (0, 3, 2, 3) and len(ran) == 1
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        FastMaxPool2d(2, padding=2)(x.contiguous(memory_format=torch.channels_last))


def test_gradients_of_second_order_are_right() -> None:
    x = images((2, 3, 5, 4), torch.float64)
    assert torch.autograd.gradcheck(FastMaxPool2d(2, ceil_mode=True), x)
    assert torch.autograd.gradgradcheck(FastMaxPool2d(2, ceil_mode=True), x)
