"""A plan says how far it is at most from the cheapest, and that is so."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from shardwise import LayerGraph, Plan, capture, plan, zoo
from shardwise.cluster.cluster import Cluster
from shardwise.planner.best_plan import Planner, complete, predict
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.optimality import Optimality, least_cost
from shardwise.planner.planned import examine
from shardwise.planner.shown_plan import as_data


def every_plan(costs: Costs) -> list[Plan]:
    planner = Planner(costs)
    names = [layer.name for layer in planner.layers]
    tried = itertools.product(*(costs.of(layer).configs for layer in planner.layers))
    return [complete(costs.graph, costs.world, dict(zip(names, c, strict=True))) for c in tried]


def small(training: bool = True) -> LayerGraph:
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20))
    return capture(net, torch.zeros(6, 40), training=training)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rate", ["1kB", "1MB", "10MB", "1GB"])
def test_no_plan_within_any_memory_undercuts_the_bound(rate: str, inference: bool) -> None:
    training = Training.none() if inference else None
    costs = Costs(small(not inference), Cluster.load(f"2@{rate}/s"), training=training)
    found = [predict(made, costs) for made in every_plan(costs)]
    bounds = []
    for cap in sorted({each.memory for each in found}):
        fitting = [each.seconds for each in found if each.memory <= cap]
        bound, _ = least_cost(Planner(costs), cap)
        assert bound <= min(fitting) * (1 + 1e-9)
        bounds.append(bound)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx(min(each.seconds for each in found))


def test_the_plan_of_least_cost_is_proven_to_be_that() -> None:
    costs = Costs(small(), Cluster.load("2@10MB/s"))
    made = examine(costs, chosen=Planner(costs).best())
    assert made.findings.optimality.gap == pytest.approx(0, abs=1e-9)
    assert "costs less than this one" in str(made.findings.optimality)


def test_another_plan_is_as_far_away_as_it_costs_more() -> None:
    costs = Costs(small(), Cluster.load("2@10MB/s"))
    least = predict(Planner(costs).best(), costs).seconds
    other = examine(costs, chosen=Plan.uniform(costs.graph, n=2)).findings
    assert other.optimality.gap == pytest.approx(other.prediction.seconds / least - 1)
    assert other.optimality.bound_seconds == pytest.approx(least)


def test_a_limit_that_binds_is_named_and_its_gap_is_finite() -> None:
    costs = Costs(small(), Cluster.load("2@1kB/s"))
    cap = Planner(costs).least_memory()[1].memory
    made = examine(costs, cap=cap).findings
    assert made.prediction.memory <= cap and made.optimality.cap == cap
    assert 0 <= made.optimality.gap < 100 and "within" in str(made.optimality)


def test_the_gap_and_the_time_are_printed_and_in_the_data() -> None:
    made = plan(zoo.build("digits"), torch.zeros(32, 1, 8, 8), cluster="4x1Gb")
    assert str(made.findings.optimality) in str(made)
    data = as_data(made)
    assert data["gap"] >= -1e-12 and data["search_seconds"] > 0
    assert data["bound_seconds"] <= data["cost_seconds"] * (1 + 1e-9)


def test_a_plan_beyond_the_splits_that_were_tried_is_said_to_be_so() -> None:
    assert "less with splits that were not tried" in str(Optimality(0.9, 1.0, 1, 1, 0.1))
