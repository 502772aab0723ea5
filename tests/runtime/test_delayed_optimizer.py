"""Delayed updates: the weights are those of the same optimizer without delay."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from exactness import seeded, seeded_input
from pool import shared_pool
from shardwise import Config, Engine, Plan, capture, parallelize

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "decay": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
}
SHAPE = (8, 3, 6, 6)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),  # its gradient would be rounding errors only
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 10),
        nn.ReLU(),
        nn.Linear(10, 9, bias=False),
        nn.ReLU(),
        nn.Linear(9, 4),
    )


def train(model: nn.Module, stepper: Any, accumulate: int = 1, clip: Any = None) -> nn.Module:
    """20 steps with another learning rate each, an evaluation in between."""
    y = torch.arange(8) % 4
    schedule = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.95)
    for step in range(20):
        x = seeded_input(SHAPE) + 0.1 * step
        nn.functional.cross_entropy(model(x), y).backward()
        if (step + 1) % accumulate:
            continue
        if clip is not None:
            clip(model)
        stepper.step()
        stepper.zero_grad()
        schedule.step()
        if step == 9:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return model


def clip_alone(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_parallel(model: Any) -> None:
    model.clip_grad_norm_(0.5)


def plan_for(world: int, num_gathered: int) -> Plan:
    """Samples are split; the first so many linear layers gather."""
    gathered = ("4", "6", "8")[:num_gathered]
    return Plan.make(
        capture(net(), torch.zeros(SHAPE)),
        world,
        lambda la: dataclasses.replace(
            Config(n=world), gradient="gather" if la.name in gathered else "sum"
        ),
    )


def delayed(kind: str, engine: Engine, num_gathered: int, **options: Any) -> Any:
    make, settings = KINDS[kind]
    model = parallelize(seeded(net()), plan_for(4, num_gathered), gradients=engine)
    stepper = shardwise.optimizer(model, make, **settings)
    assert isinstance(stepper, make)
    train(model, stepper, **options)
    return model.state_dict(), [float(g["lr"]) for g in stepper.param_groups]


def assert_same(kind: str, engine: Engine, num_gathered: int, **options: Any) -> None:
    make, settings = KINDS[kind]
    plain = seeded(net())
    alone = dict(options)
    if "clip" in options:
        alone["clip"] = clip_alone
    train(plain, make(plain.parameters(), **settings), **alone)
    for state, _ in shared_pool(4).run(partial(delayed, **options), kind, engine, num_gathered):
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_gathered", [1, 2, 3])
def test_delayed_updates_are_exact(kind: str, num_gathered: int) -> None:
    assert_same(kind, Engine("chunks", last=num_gathered), num_gathered)


@pytest.mark.parametrize(
    "engine",
    [
        Engine("end"),
        Engine("layer"),
        Engine("chunks", last=2),
        Engine("layer", wait="use"),
        Engine("layer", wait="use", held=1),
        Engine("end", wait="use", held=9),
    ],
)
def test_delayed_updates_are_exact_with_every_engine(engine: Engine) -> None:
    assert_same("momentum", engine, 2)


LATE = Engine("layer", wait="use", held=1)


@pytest.mark.parametrize("engine", [Engine(), LATE], ids=lambda engine: engine.wait)
def test_gradients_of_several_backward_passes_add_up(engine: Engine) -> None:
    assert_same("momentum", engine, 2, accumulate=2)


@pytest.mark.parametrize("engine", [Engine(), LATE], ids=lambda engine: engine.wait)
def test_clipped_gradients_are_not_late(engine: Engine) -> None:
    assert_same("adam", engine, 2, clip=clip_parallel)


def _order() -> tuple[bool, bool, bool, bool]:
    """Whether gradients are late, and when weights change."""
    model = parallelize(seeded(net()), plan_for(4, 1))
    stepper = shardwise.optimizer(model, torch.optim.SGD, lr=0.1)
    weight = model.get_parameter("4.weight")
    before = weight.detach().clone()
    model(seeded_input(SHAPE)).sum().backward()
    late = weight.grad is None
    stepper.step()
    stepper.zero_grad()
    unchanged = torch.equal(weight, before)
    copied = stepper.state_dict()  # flushes
    changed = not torch.equal(weight, before)
    return late, unchanged, changed, bool(copied)


def test_an_update_comes_when_it_is_needed() -> None:
    assert shared_pool(4).run(_order) == [(True, True, True, True)] * 4


def _discarded() -> bool:
    """Gradients that are set to zero before any step leave the weights alone."""
    model = parallelize(seeded(net()), plan_for(4, 2))
    stepper = shardwise.optimizer(model, torch.optim.SGD, lr=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(seeded_input(SHAPE)).sum().backward()
    stepper.zero_grad()
    stepper.step()
    model(seeded_input(SHAPE))
    return all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_gradients_that_are_set_to_zero_are_gone() -> None:
    assert all(shared_pool(4).run(_discarded))
