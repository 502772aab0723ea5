"""P3's replicated gradients: every rank computes the whole gradient of a linear layer's weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from exactness import assert_exact, seeded, seeded_input
from shardwise import Plan, capture
from shardwise.cluster.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.geometry.grid import Config
from shardwise.graph.layer_graph import LayerGraph
from shardwise.planner.costs import Costs
from shardwise.plans.compile import compile_program

NET = nn.Sequential(
    nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3, bias=False)
)


def gathered(graph: LayerGraph, world: int, *names: str, workers: int | None = None) -> Plan:
    """Samples are split; these linear layers gather."""
    split = Config(n=workers or world)

    def choose(layer):  # type: ignore[no-untyped-def]
        return dataclasses.replace(split, gradient="gather" if layer.name in names else "sum")

    return Plan.make(graph, world, choose)


@pytest.mark.parametrize("batch", [8, 7, 3])
def test_gathered_gradients_are_exact(batch: int) -> None:
    net, x = seeded(NET), seeded_input((batch, 6))
    graph = capture(net, x)
    plans = [
        gathered(graph, 4, "0", "2", "4"),
        gathered(graph, 4, "2"),
        gathered(graph, 4, "0", "4", workers=3),
    ]
    assert_exact(net, x, plans, num_steps=2)


def test_gathered_gradients_of_positions_are_exact() -> None:
    net, x = seeded(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))), seeded_input((5, 3, 6))
    assert_exact(net, x, [gathered(capture(net, x), 2, "0", "1")])


class Computed(nn.Module):
    """Weights that are computed, and those that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(5, 6)), nn.Parameter(torch.ones(5))
        self.register_buffer("fixed", torch.ones(4, 5))
        self.last = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, functional.normalize(self.weight), self.bias)
        return functional.linear(y.relu(), self.fixed, self.last)


def test_weights_that_are_computed_or_not_trained_are_not_gathered() -> None:
    net, x = seeded(Computed()), seeded_input((5, 6))
    graph = capture(net, x)
    names = [layer.name for layer in graph.layers if layer.op == "linear"]
    assert len(names) == 2
    plan, gather = Plan.uniform(graph, n=2), Config(n=2, gradient="gather")
    for name in names:
        with pytest.raises(PlanError, match=f"layer '{name}'"):
            Plan.make(graph, 2, lambda la, n=name: gather if la.name == n else plan.layers[la.name])
    costs = Costs(graph, Cluster.load("4x1Gb"))
    for name in names:
        assert all(config.gradient == "sum" for config in costs.of(graph[name]).configs)
    assert_exact(net, x, [plan, Plan.uniform(graph, n=3)], num_steps=2)


def test_only_linear_layers_over_samples_gather() -> None:
    graph = capture(NET, seeded_input((8, 6)).float())
    with pytest.raises(PlanError, match="linear layers that are split over samples only"):
        Plan.make(graph, 2, lambda layer: Config(f=2, gradient="gather"))
    with pytest.raises(PlanError, match="layer '1'"):
        gathered(graph, 2, "1")
    with pytest.raises(ValueError, match="gradient 'mean' must be sum or gather"):
        Config(n=2, gradient="mean")


def test_a_plan_that_gathers_round_trips_and_sums_nothing_twice() -> None:
    graph = capture(NET, seeded_input((8, 6)).float())
    plan = gathered(graph, 4, "0")
    assert Plan.from_json(plan.to_json()) == plan
    program = compile_program(graph, plan, 0, frozenset())
    assert program.gathered == {"0.weight", "0.bias"}
