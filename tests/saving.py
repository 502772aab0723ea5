"""A network with everything a checkpoint must hold, and its training alone and under plans."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise
from exactness import seeded, seeded_input
from shardwise import Config, ParallelModel, Plan, capture, parallelize
from shardwise.checkpoint import Checkpoints, pieces

SHAPE = (6, 3, 7, 6)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}),
    "delayed": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "plain": (torch.optim.SGD, {"lr": 0.02}),
}


class Net(nn.Module):
    """Uneven channels, statistics, dropout, tied and frozen weights, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.frozen = nn.Conv2d(5, 7, 1).requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.fc0 = nn.Linear(7, 9)
        self.fc1, self.fc2 = nn.Linear(9, 9), nn.Linear(9, 9)
        self.fc2.weight = self.fc1.weight
        self.head = nn.Linear(9, 4)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.frozen(self.norm(self.conv0(x)).relu())).mean((2, 3))
        return self.head(self.fc2(self.fc1(self.fc0(x).relu()).relu()))


def make_plan(world: int, seed: int | None) -> Plan:
    """A random plan, fewer workers per layer included; without seed, linear layers gather."""
    graph = capture(seeded(Net()), torch.zeros(SHAPE, dtype=torch.float64))
    if seed is not None:
        return Plan.random(graph, world, seed)
    gathered = Config(n=world, gradient="gather")
    return Plan.make(graph, world, lambda la: gathered if la.op == "linear" else Config(n=world))


def train(model: nn.Module, stepper: Any, steps: Iterable[int]) -> None:
    """Steps with their own samples and learning rate."""
    for step in steps:
        x, y = seeded_input(SHAPE, seed=step), torch.arange(SHAPE[0]) % 4
        nn.functional.cross_entropy(model(x), y).backward()
        stepper.step()
        stepper.zero_grad()
        for group in stepper.param_groups:
            group["lr"] *= 0.9


def train_alone(kind: str, num_steps: int) -> dict[str, torch.Tensor]:
    """What an undisturbed run on one device comes to."""
    model, (make, settings) = seeded(Net()), OPTIMIZERS[kind]
    torch.manual_seed(3)
    train(model, make(model.parameters(), **settings), range(num_steps))
    return model.state_dict()


def start(plan: Plan, kind: str, seed: int = 0) -> tuple[ParallelModel, Any]:
    """A model under a plan and its optimizer, on every rank."""
    pieces.SMALL = 100  # bytes: so that blocks of a small net are written in parts
    model, (make, settings) = parallelize(seeded(Net(), seed), plan), OPTIMIZERS[kind]
    torch.manual_seed(seed + 3)
    if kind == "delayed":
        return model, shardwise.optimizer(model, make, **settings)
    return model, make(model.parameters(), **settings)


def train_from(
    folder: Path, plan: Plan, kind: str, first: int, last: int, save: int
) -> dict[str, torch.Tensor]:
    """Continues from the checkpoint of a step, if that is not the first; saves at another."""
    model, stepper = start(plan, kind, seed=first)
    checkpoints = Checkpoints(folder)
    if first:
        assert checkpoints.latest() == first
        assert checkpoints.load(model, stepper) == {"at": first, "plan": [1, None, "x"]}
    train(model, stepper, range(first, save))
    checkpoints.save(save, model, stepper, {"at": save, "plan": (1, None, "x")})
    train(model, stepper, range(save, last))  # while it is written
    checkpoints.wait()
    return model.state_dict()
