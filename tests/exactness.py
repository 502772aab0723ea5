"""Checks that modules under plans compute what they compute alone, on the worker pool."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from pool import shared_pool
from shardwise.capture import capture
from shardwise.comm import Communicator
from shardwise.graph import LayerGraph
from shardwise.plan import Plan
from shardwise.verify import Comparison, compare

# "cuda" runs the ranks of these tests on one GPU, over gloo.
DEVICE = os.environ.get("SHARDWISE_TEST_DEVICE", "cpu")


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64 with all parameters random, norms included."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.1)
    return module


def seeded_input(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _compare(
    module: nn.Module, graph: LayerGraph, plans: list[Plan], inputs: Any, steps: int
) -> list[list[Comparison]]:
    comm = Communicator()
    module, inputs = module.to(DEVICE), tuple(x.to(DEVICE) for x in inputs)
    return [
        compare(module, plan, inputs, comm, steps, graphs=lambda training, batch: graph)
        for plan in plans
    ]


def assert_exact(
    module: nn.Module,
    inputs: torch.Tensor | tuple[torch.Tensor, ...],
    plans: list[Plan],
    graph: LayerGraph | None = None,
    num_steps: int = 1,
) -> None:
    """Every plan gives the outputs, gradients and statistics of one device."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    graph = graph or capture(module, *inputs)
    for world in sorted({plan.world for plan in plans}):
        chosen = [plan for plan in plans if plan.world == world]
        results = shared_pool(world).run(_compare, module, graph, chosen, inputs, num_steps)
        for plan, comparisons in zip(chosen, results[0], strict=True):
            wrong = [c for c in comparisons if not c.passed]
            assert not wrong, f"{wrong}\n{graph}\n{plan}"
            assert comparisons
