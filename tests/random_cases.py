"""Random modules under random plans: how many, and how each is checked."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from torch import nn

from exactness import assert_exact, seeded, seeded_input
from shardwise.model.capture import capture
from shardwise.plans.plan import Plan

PLANS = 6  # per example
EXAMPLES = 16  # per property: with six plans each, 96 cases
DEEP = 900
# Small ones more often: a case takes as many seconds as it has ranks, and finds as much.
WORLDS = (2, 3, 2, 4, 8, 2, 3, 2, 4, 3, 6, 1, 2, 3, 2, 4, 5, 2, 3, 2, 4, 1, 7, 3)
quick = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
deep = settings(max_examples=DEEP, deadline=None, suppress_health_check=list(HealthCheck))


def check(module: nn.Module, shape: tuple[int, ...], seed: int) -> None:
    """The module on random numbers of this shape."""
    check_on(module, (seeded_input(shape, seed),), seed)


def check_on(module: nn.Module, inputs: tuple[torch.Tensor, ...], seed: int) -> None:
    """A few random plans of this module equal one device."""
    module = seeded(module, seed)
    graph = capture(module, *inputs)
    worlds = [WORLDS[(seed + i) % len(WORLDS)] for i in range(PLANS)]
    plans = [Plan.random(graph, world, seed + i) for i, world in enumerate(worlds)]
    assert_exact(module, inputs, plans, graph)
