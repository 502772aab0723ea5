"""Checks that modules under plans compute what they compute alone, in worlds of one process."""

from __future__ import annotations

import os

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import capture
from shardwise.plans.plan import Plan
from shardwise.verify import Comparison, compare

# "cuda" runs the ranks of these tests on one GPU.
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
    module, inputs = module.to(DEVICE), tuple(x.to(DEVICE) for x in inputs)

    def work(comm: Communicator, plan: Plan) -> list[Comparison]:
        return compare(module, plan, inputs, comm, num_steps, graphs=lambda *_: graph)

    for seed, plan in enumerate(plans):
        comparisons = World(plan.world, seed).run(work, plan)[0]
        wrong = [c for c in comparisons if not c.passed]
        assert not wrong, f"{wrong}\n{graph}\n{plan}"
        assert comparisons
