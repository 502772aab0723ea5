"""Gradients that add up under no_sync(): summed once, and never read before they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from exactness import seeded
from habits.habit import PLANS, assert_refused, assert_same, image, net
from shardwise import Engine, Plan, capture, optimizer, parallelize
from shardwise.comm.in_process import InProcess, World
from shardwise.geometry.grid import Config


def apart(model: Any) -> AbstractContextManager[Any]:
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().sum()
    loss.backward()
    return loss


def accumulates(model: Any, x: torch.Tensor, make: Any = torch.optim.SGD) -> Any:
    sgd = make(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(2):
        with apart(model):
            losses += [step(model, x), step(model, x + 1), step(model, 2 * x)]
        losses.append(step(model, x - 1))
        sgd.step()
        sgd.zero_grad()
    step(model, x)
    return losses


def after_a_sum(model: Any, x: torch.Tensor) -> Any:
    step(model, x)
    with apart(model):
        step(model, x + 1)
    step(model, x - 1)
    with apart(model):
        step(model, x + 2)
        step(model, x + 3)
    step(model, x - 2)


def penalised(model: Any, x: torch.Tensor) -> Any:
    def penalty() -> torch.Tensor:
        return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]

    with apart(model):
        (model(x).square().sum() + penalty()).backward()
        penalty().backward()
    (model(x + 1).square().sum() + penalty()).backward()


def abandoned(model: Any, x: torch.Tensor) -> Any:
    for keep in (True, False):
        with apart(model):
            step(model, x)
        model.zero_grad(set_to_none=keep)
        with apart(model):
            step(model, x + 1)
        for param in model.parameters():
            param.grad.mul_(0.5)
            param.grad /= 3
        step(model, x - 1)
    with apart(model):
        step(model, x)
    torch.optim.SGD(model.parameters(), foreach=True).zero_grad(set_to_none=False)
    step(model, x + 2)


def asked_in_between(model: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    with apart(model):
        step(model, x.detach())
        saliency = torch.autograd.grad(model(x).sum(), x)
    torch.autograd.grad(model(x).square().sum(), x)
    step(model, x.detach() + 1)
    return saliency


def half_inside(model: Any, x: torch.Tensor) -> Any:
    with apart(model):
        y = model(x)
    y.square().sum().backward()
    y = model(x + 1)
    with apart(model):
        y.square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def on_one_rank(model: Any, x: torch.Tensor) -> Any:
    with apart(model) if hasattr(model, "comm") and model.comm.rank == 1 else nullcontext():
        step(model, x)
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def with_hooks(model: Any, x: torch.Tensor) -> Any:
    seen = []
    model.norm.weight.register_hook(lambda g: seen.append(1))
    with apart(model):
        step(model, x)
    step(model, x + 1)
    return seen


def without_samples(model: Any, x: torch.Tensor) -> Any:
    with apart(model):
        step(model, x[:1])
        step(model, x[:0])
    step(model, x[:1] + 1)


SAME: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "accumulates": accumulates,
    "after a sum": after_a_sum,
    "penalised": penalised,
    "abandoned": abandoned,
    "asked in between": asked_in_between,
    "half inside": half_inside,
    "on one rank": on_one_rank,
    "with hooks": with_hooks,
    "without samples": without_samples,
}


@pytest.mark.parametrize("name", SAME)
def test_gradients_of_no_sync_are_those_of_one_device(name: str) -> None:
    assert_same(SAME[name])


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.trunk(x).relu()
        return self.one(y), self.two(y.mean((2, 3)))


def test_a_head_that_only_a_pass_under_no_sync_has_used_is_summed_too() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        with apart(model):
            model(x)[0].square().sum().backward()
        model(x + 1)[1].square().sum().backward()

    assert_same(use, lambda: seeded(Heads()))


@pytest.mark.parametrize("wait", ["backward", "step", "use"])
def test_gradients_of_no_sync_are_the_same_whenever_sums_are_waited_for(wait: Any) -> None:
    plain, x = net(), image()
    accumulates(plain, x)
    graph = capture(net(), x)
    plans = [Plan.uniform(graph, 2, n=2), Plan.uniform(graph, 2, h=2)]
    gathered = Config(n=2, gradient="gather")
    plans.append(
        Plan.make(graph, 2, lambda layer: gathered if layer.op == "linear" else Config(n=2))
    )

    def work(comm: InProcess, plan: Plan) -> dict[str, torch.Tensor]:
        model: Any = parallelize(net(), plan, comm=comm, gradients=Engine("layer", wait=wait))
        accumulates(model, x, lambda _, **options: optimizer(model, torch.optim.SGD, **options))
        return model.state_dict()

    for plan in plans:
        for found in World(2).run(work, plan):
            for name, weight in plain.state_dict().items():
                torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


class Counting(World):
    """Counts the messages of sums of gradients."""

    num_sums = 0

    def post(self, channel: Any, *content: Any) -> Any:
        self.num_sums += channel[0] == "gradients"
        return super().post(channel, *content)


@pytest.mark.parametrize("name", PLANS)
def test_passes_under_no_sync_send_no_messages_for_sums_of_gradients(name: str) -> None:
    size, make = PLANS[name]
    x = image()
    plan = make(capture(net(), x))

    def work(comm: InProcess, times: int, held: bool) -> None:
        model: Any = parallelize(net(), plan, comm=comm)
        with model.no_sync() if held else nullcontext():
            for _ in range(times):
                step(model, x)
        step(model, x)

    counts = []
    for times, held in ((0, False), (3, False), (3, True)):
        world = Counting(size)
        world.run(work, times, held)
        counts.append(world.num_sums)
    one, each, once = counts
    assert each == 4 * one and once == one
    assert one > 0 or name == "f=2"  # whose weights all are blocks


READERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "clip": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "own clip": lambda model: model.clip_grad_norm_(1.0),
    "gradients": lambda model: model.full_gradients(),
    "norm": lambda model: sum(p.grad.norm() for p in model.parameters()),
    "data": lambda model: [p.grad.data for p in model.parameters()],
    "copy": lambda model: [p.grad.clone() for p in model.parameters()],
    "scaler": lambda model: _unscale(model),
    "type": lambda model: model.float(),
}


def _unscale(model: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", READERS)
def test_gradients_that_wait_for_their_sum_are_not_read(name: str) -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        with apart(model):
            step(model, x)
        if hasattr(model, "no_sync"):
            READERS[name](model)

    sentence = "the gradient of '.*' has not been summed over ranks: .*no_sync.*; run one outside"
    everywhere = ["random"] if name in ("step", "own clip", "gradients") else []
    assert_refused(use, sentence, under=["n=2", "h=2", *everywhere])


def test_hooks_that_come_between_a_gradient_and_its_sum_are_refused() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        with apart(model):
            step(model, x)
        model.norm.weight.register_hook(lambda g: 2 * g)
        step(model, x)

    assert_refused(use, "has not been summed .* which may have no hooks", under=["n=2", "h=2"])
