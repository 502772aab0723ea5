"""Optimizer state that ranks share: the weights are those of the same optimizer that keeps all."""

from __future__ import annotations

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
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.05}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
SHAPE = (8, 3, 6, 6)


def net() -> nn.Module:
    """Sizes that ranks cannot share evenly, and one that some have none of."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 1, 3, padding=1),
        nn.Flatten(),
        nn.Linear(36, 10),
        nn.PReLU(),
        nn.Linear(10, 4),
    )


def plan_for(world: int, split: bool) -> Plan:
    """Samples are split; filters of the first linear layer too, where asked for."""
    return Plan.make(
        capture(net(), torch.zeros(SHAPE)),
        world,
        lambda la: Config(n=world // 2, f=2) if split and la.name == "5" else Config(n=world),
    )


def train(model: nn.Module, stepper: Any, num_steps: int = 4) -> nn.Module:
    y = torch.arange(8) % 4
    for step in range(num_steps):
        nn.functional.cross_entropy(model(seeded_input(SHAPE) + 0.1 * step), y).backward()
        stepper.step()
        stepper.zero_grad()
    return model


def shared(kind: str, world: int, split: bool, engine: Engine) -> Any:
    make, settings = KINDS[kind]
    model = parallelize(seeded(net()), plan_for(world, split), gradients=engine)
    stepper = shardwise.optimizer(model, make, shard_state=True, **settings)
    train(model, stepper)
    weights = model.state_dict()
    kept = sum(v.numel() for own in stepper.state.values() for v in own.values() if v.ndim)
    return weights, kept, stepper.state_dict()["state"]


def assert_same(kind: str, world: int, split: bool, engine: Engine | None = None) -> None:
    make, settings = KINDS[kind]
    plain = seeded(net())
    stepper = make(plain.parameters(), **settings)
    train(plain, stepper)
    whole = sum(v.numel() for own in stepper.state.values() for v in own.values() if v.ndim)
    found = shared_pool(world).run(shared, kind, world, split, engine or Engine())
    assert sum(kept for _, kept, _ in found) == whole  # nothing is kept twice
    for weights, _, state in found:
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)
        for number, own in stepper.state_dict()["state"].items():
            for key, value in own.items():
                torch.testing.assert_close(state[number][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_state_gives_the_weights_and_state_of_one_device(kind: str) -> None:
    assert_same(kind, 2, split=False)


@pytest.mark.parametrize("kind", ["momentum", "fused", "adagrad"])
def test_ranks_share_with_those_that_hold_the_same_block(kind: str) -> None:
    assert_same(kind, 4, split=True)


@pytest.mark.parametrize("wait", ["backward", "step", "use"])
def test_shared_state_is_exact_however_long_sums_go_on(wait: Any) -> None:
    assert_same("adam", 2, split=False, engine=Engine("layer", wait=wait))
