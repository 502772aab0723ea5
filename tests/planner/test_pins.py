"""Pinned layers have their split, and the others are the best around them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from shardwise import Config, LayerGraph, PlanError, ShardwiseError, capture, plan, zoo
from shardwise.cluster.cluster import Cluster
from shardwise.planner.best_plan import Planner, complete, predict
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.pins import pinned


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20))
    return capture(net, torch.zeros(6, 40))


@pytest.mark.parametrize("split", ["n=2", "f=2", "c=2", "whole", "n=2 gather"])
def test_no_assignment_with_the_pinned_split_costs_less(graph: LayerGraph, split: str) -> None:
    free = Costs(graph, Cluster.load("2@10MB/s"))
    costs = pinned(free, {"0": split})
    names = [layer.name for layer in Planner(free).layers]
    tried = [free.of(graph[name]).configs for name in names]
    tried[names.index("0")] = costs.of(graph["0"]).configs
    plans = [
        complete(graph, 2, dict(zip(names, c, strict=True))) for c in itertools.product(*tried)
    ]
    best = Planner(costs).best()
    assert str(best.layers["0"]) == split
    expected = min(predict(made, free).seconds for made in plans)
    assert predict(best, free).seconds == pytest.approx(expected)


def test_a_pin_of_the_free_choice_changes_nothing(graph: LayerGraph) -> None:
    free = plan(graph, cluster="2@10MB/s")
    for name, config in free.layers.items():
        if not graph[name].is_input:
            assert plan(graph, cluster="2@10MB/s", pins={name: config}) == free


def test_the_costs_without_pins_stay_as_they_were(graph: LayerGraph) -> None:
    costs = Costs(graph, Cluster.load("4x10Gb"))
    before = Planner(costs).best()
    pinned(costs, {"0": "f=4"})
    assert Planner(costs).best() == before and not costs.pins


def test_a_split_that_the_search_does_not_try_can_be_pinned() -> None:
    made = plan(
        zoo.build("digits"), torch.zeros(8, 1, 8, 8), cluster="4x1Gb", pins={"0.0": "h=3 @1,2,3"}
    )
    assert made.layers["0.0"] == Config(h=3, ranks=(1, 2, 3))
    made.check(made.findings.costs.graph)


def test_without_ranks_a_pin_lies_where_it_costs_least() -> None:
    graph = capture(zoo.build("digits"), torch.zeros(32, 1, 8, 8))
    costs = Costs(graph, Cluster.load("k80x16"))
    free = pinned(costs, {"0.0": "n=4"})
    assert {config.ranks for config in free.of(graph["0.0"]).configs} == {
        (0, 1, 2, 3),
        (0, 4, 8, 12),
    }
    exact = pinned(costs, {"0.0": "n=4 @0:16:4"})
    assert [config.ranks for config in exact.of(graph["0.0"]).configs] == [(0, 4, 8, 12)]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"00": "n=2"}, "no layer '00' to pin; did you mean '0'"),
        ({"input": "n=2"}, "no layer 'input' to pin"),
        ({"0": "h=2"}, r"layer '0' \(linear\) cannot be split over height"),
        ({"0": "f=8"}, "layer '0': split 'f=8' needs 8 workers, and there are 2"),
        ({"0": "q=2"}, "layer '0': split 'q=2': 'q' is not an axis"),
        ({"0": Config(n=2, ranks=(0, 5))}, "rank 5 does not exist among 2"),
    ],
)
def test_a_pin_that_cannot_be_is_named(graph: LayerGraph, pins: dict, message: str) -> None:
    with pytest.raises(ShardwiseError, match=message):
        plan(graph, cluster="2x10Gb", pins=pins)


def test_an_output_whose_loss_needs_all_classes_is_not_pinned_to_a_part(graph: LayerGraph) -> None:
    training = Training(output="local")
    with pytest.raises(PlanError, match="'2': f=2 leaves ranks with a part of the classes"):
        plan(graph, cluster="2x10Gb", training=training, pins={"2": "f=2"})


def test_a_pin_that_does_not_fit_is_named(graph: LayerGraph) -> None:
    fits = plan(graph, cluster="2@1kB/s")
    split = plan(graph, cluster="2@1kB/s", pins={"0": "f=2", "2": "f=2"})
    cap = split.findings.prediction.memory
    assert cap < fits.findings.prediction.memory
    with pytest.raises(PlanError, match=r"does not fit: .*, with '0' pinned$"):
        plan(graph, cluster="2@1kB/s", pins={"0": "whole"}, memory=cap)
