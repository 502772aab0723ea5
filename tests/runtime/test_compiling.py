"""Compiled blocks: parts of a block traced and compiled, and what is left out of them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, ShardwiseError, capture, of, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World

SPLITS: list[dict[str, int]] = [{}, {"n": 2}, {"h": 2}, {"f": 2}, {"c": 2}]


class Net(nn.Module):
    """Norms, a skip, dropout, and a batch norm that averages all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.again = nn.Dropout(0.3), nn.Conv2d(4, 4, 3, padding=1)
        self.average, self.linear = nn.BatchNorm2d(4, momentum=None), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        y = y + self.average(self.again(self.drop(y)))
        return self.linear(y.mean((2, 3)))


@pytest.fixture
def not_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled runs as it was traced, which takes no compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def trained(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, gradients and state of two steps in training and one with frozen statistics."""
    found, sgd = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.norm.train(step < 2)
        torch.manual_seed(step)
        y = model(x)
        y.square().sum().backward()
        found.append(y.detach())
        named = dict(model.named_parameters())
        parallel = "_shardwise" in vars(model)
        gradients = of(model).full_gradients() if parallel else {n: named[n].grad for n in named}
        found += [gradients[name].clone() for name in sorted(gradients)]
        sgd.step()
        sgd.zero_grad()
    model.eval()
    with torch.no_grad():
        found.append(model(x))
    return [*found, *(t.double() for t in model.state_dict().values())]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.usefixtures("not_inductor")
def test_compiled_blocks_compute_what_one_device_computes(split: dict[str, int]) -> None:
    plain, x = seeded(Net()), seeded_input((4, 2, 6, 6))
    expected = trained(copy.deepcopy(plain), x)
    world = max(split.values(), default=1)
    plan = Plan.uniform(capture(plain, x), world, **split)

    def work(comm: Communicator) -> list[torch.Tensor]:
        return trained(parallelize(copy.deepcopy(plain), plan, comm=comm, compile=True), x)

    for found in World(world).run(work):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_the_compiler_itself_is_used() -> None:
    plain, x = seeded(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU())), seeded_input((2, 2, 5, 5))
    model = parallelize(plain, Plan.uniform(capture(plain, x)), compile=True)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_mode_that_torch_does_not_know_is_refused() -> None:
    plain, x = nn.Linear(2, 2), torch.zeros(2, 2)
    plan = Plan.uniform(capture(plain, x))
    with pytest.raises(ShardwiseError, match="compile='fastest' must be True, False, "):
        parallelize(plain, plan, compile="fastest")


class Answers(nn.Module):
    """Returns numbers, truths and places, and has no parameters."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x > 0, x.argmax(1)


@pytest.mark.usefixtures("not_inductor")
def test_graphs_hand_out_what_is_no_number_too() -> None:
    x = seeded_input((4, 3)).requires_grad_()
    model = parallelize(Answers(), Plan.uniform(capture(Answers(), x)), compile="reduce-overhead")
    found, expected = model(x), Answers()(x)
    assert all(map(torch.equal, found, expected))
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    found[0].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))
