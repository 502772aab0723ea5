"""One worker on a GPU: what plain PyTorch computes, under autocast, scaled, compiled, in graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Plan, capture, parallelize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
HALVES = (torch.bfloat16, torch.float16)


class Net(nn.Module):
    """Layers that autocast treats in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.group, self.slope = nn.GroupNorm(4, 16), nn.PReLU(16)
        self.linear, self.layer = nn.Linear(16, 10), nn.LayerNorm(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        y = self.slope(self.group(y)) + y.pow(2)
        return torch.log_softmax(self.layer(self.linear(y.mean((2, 3)))), 1)


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    return Net().cuda().to(memory_format=torch.channels_last), x


def parallel(plain: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    return parallelize(copy.deepcopy(plain), Plan.uniform(capture(plain, x)), **options)


def trained(model: nn.Module, x: torch.Tensor, dtype: Any, steps: int = 3) -> list[torch.Tensor]:
    """Outputs of some steps with a gradient scaler, then all weights and statistics."""
    sgd, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16, init_scale=2.0**40)
    for _ in range(steps):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            y = model(x)
            loss = y.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        found += [y.detach(), torch.tensor(scaler.get_scale() if scaler.is_enabled() else 1.0)]
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize("dtype", [None, *HALVES], ids=str)
def test_one_worker_computes_what_plain_torch_computes_to_the_bit(dtype: Any) -> None:
    plain, x = made()
    expected = trained(copy.deepcopy(plain), x, dtype)
    found = trained(parallel(plain, x), x, dtype)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mode", [True, "reduce-overhead"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_compiled_blocks_compute_what_plain_torch_computes(mode: Any, dtype: Any) -> None:
    plain, x = made()
    expected = trained(copy.deepcopy(plain), x, dtype, steps=6)
    found = trained(parallel(plain, x, compile=mode), x, dtype, steps=6)
    digits = 1e-4 if dtype is None else 3e-2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=digits, atol=digits)


def test_what_graphs_make_outlives_their_next_run() -> None:
    plain, x = made()
    model = parallel(plain, x, compile="reduce-overhead")
    for _ in range(3):
        model(x).square().sum().backward()  # gradients add up
    outputs = [model(x * (1 + i)) for i in range(3)]
    copies = [y.detach().clone() for y in outputs]
    one = copy.deepcopy(plain)
    for _ in range(3):
        one(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    assert all(map(torch.equal, (y.detach() for y in outputs), copies))
