"""A rank without the others: it computes as much as with them, and waits for nobody."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, capture, parallelize
from shardwise.comm.in_process import World
from shardwise.comm.silent import Silent


def net() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 4))


def computed(model: Any, x: torch.Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """The layers that run in a training step, and the shapes of what they make."""
    found: list[tuple[str, tuple[int, ...]]] = []
    model._shardwise.watch = lambda name, y: found.append((name, tuple(y.shape)))
    model(x).square().sum().backward()
    return found


@pytest.mark.parametrize("split", [{"n": 4}, {"h": 4}, {"f": 2, "c": 2}, {"n": 2, "w": 2}], ids=str)
def test_a_silent_rank_computes_the_blocks_of_a_rank_among_others(split: dict[str, int]) -> None:
    plain, x = seeded(net()), seeded_input((4, 3, 8, 8))
    plan = Plan.uniform(capture(plain, x), 4, **split)

    def work(comm: Any) -> Any:
        return computed(parallelize(copy.deepcopy(plain), plan, comm=comm), x)

    together = World(4).run(work)
    for rank in range(4):
        assert work(Silent(rank, 4)) == together[rank]
