"""Plans: uniform, OWT and random ones, files, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Config, Plan, PlanError, capture, zoo
from shardwise.graph.layer_graph import LayerGraph


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return capture(model, torch.zeros(8, 3, 6, 5))


def test_a_uniform_plan_gives_every_layer_what_it_can_take(graph: LayerGraph) -> None:
    plan = Plan.uniform(graph, n=2, h=2)
    assert str(plan.layers["0"]) == "n=2 h=2"
    assert str(plan.layers["4"]) == "n=4"  # a linear layer has no height
    assert str(Plan.uniform(graph, c=4).layers["0"]) == "f=2 c=2"  # it has only three channels


def test_owt_splits_convolutions_by_samples_and_linear_layers_by_filters(graph: LayerGraph) -> None:
    plan = Plan.owt(graph, 4)
    assert str(plan.layers["0"]) == "n=4" and str(plan.layers["4"]) == "f=4"


def test_a_plan_is_the_same_after_a_round_trip_through_json(graph: LayerGraph, tmp_path) -> None:
    for seed in range(20):
        plan = Plan.random(graph, 6, seed)
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


def test_random_plans_use_fewer_workers_and_any_order_of_ranks(graph: LayerGraph) -> None:
    configs = [c for s in range(50) for c in Plan.random(graph, 6, s).layers.values()]
    assert {c.num_workers for c in configs} == {1, 2, 3, 4, 5, 6}
    assert any(list(c.ranks) != sorted(c.ranks) for c in configs)


@pytest.mark.parametrize(
    ("layer", "config", "sentence"),
    [
        ("0", Config(h=8), "h=8 is larger than its 6 height; legal: h from 1 to 6"),
        (
            "0",
            Config(d=2),
            "cannot be split over depth (d=2); legal: n, f up to 8, c up to 3, h up",
        ),
        ("4", Config(f=8), "f=8 is larger than its 4 filters"),
        ("1", Config(c=3, f=3), "f x c = 9 is larger than its 8 channels"),
        ("1", Config(n=2, ranks=(0, 9)), "rank 9 does not exist among 9 workers"),
    ],
)
def test_an_illegal_config_names_the_layer_and_what_is_legal(
    graph: LayerGraph, layer: str, config: Config, sentence: str
) -> None:
    layers = {**Plan.uniform(graph, 9).layers, layer: config}
    plan = Plan(9, layers, Plan.uniform(graph).inputs, graph.signature)
    with pytest.raises(PlanError) as error:
        plan.check(graph)
    assert sentence in str(error.value) and repr(layer) in str(error.value)


def test_a_plan_of_another_model_is_refused_but_not_of_another_size(graph: LayerGraph) -> None:
    plan = Plan.uniform(graph, 2, n=2)
    with pytest.raises(PlanError, match=r"layer '1', which the model has not|nearest"):
        plan.check(capture(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), torch.zeros(8, 3, 6, 5)))

    def of_size(size: int, filters: int = 8) -> LayerGraph:
        convolution = nn.Conv2d(3, filters, 3, padding=1)
        rest = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(filters, 4)
        return capture(nn.Sequential(convolution, *rest), torch.zeros(8, 3, size, 5))

    plan.check(of_size(7))
    with pytest.raises(PlanError, match=r"another model \(network \w+\) than this one"):
        plan.check(of_size(6, filters=6))
    short = Plan(2, {"input": Config()}, plan.inputs, plan.signature)
    with pytest.raises(PlanError, match="no entry for layer '0'"):
        short.check(graph)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.pop("world"), "world: Field required"),
        (lambda d: d.update(world="4"), "world: Input should be a valid integer"),
        (lambda d: d.update(colour="red"), "colour: Extra inputs are not permitted"),
        (lambda d: d["layers"]["0"].update(h=0), "layers.0.h: Input should be greater"),
        (lambda d: d["layers"]["0"].update(ranks=[0]), "layer '0': 1 ranks [0] for a split"),
        (lambda d: d.update(format="other"), "format 'other' is not"),
    ],
)
def test_a_damaged_plan_file_names_the_field(graph: LayerGraph, tmp_path, change, sentence) -> None:
    data = json.loads(Plan.uniform(graph, n=2).to_json())
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert sentence in str(error.value) and "plan.json" in str(error.value)


def test_a_plan_file_that_is_not_there_or_not_json_is_named(tmp_path) -> None:
    with pytest.raises(PlanError, match=r"nothing\.json"):
        Plan.load(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match=r"bad\.json"):
        Plan.load(tmp_path / "bad.json")


def test_the_plan_says_which_layers_have_no_strategy() -> None:
    class Renorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.renorm(x, 2, 1, 0.5).relu()

    plan = Plan.uniform(capture(Renorm(), torch.zeros(2, 3, 4, 4)), n=2)
    assert plan.whole == ("renorm",) and "renorm  whole  (no strategy: one worker)" in str(plan)


@pytest.mark.parametrize("name", ["alexnet", "unet3d", "digits"])
def test_uniform_plans_exist_for_networks_of_the_zoo(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    graph = capture(model.to_empty(device="cpu"), torch.zeros(zoo.input_shape(name, 4)))
    for degrees in ({"n": 4}, {"h": 2, "w": 2}, {"c": 4}, {"f": 4}, {"c": 2, "f": 2}):
        assert Plan.uniform(graph, **degrees).world == 4


def test_the_last_line_names_operators_without_a_strategy() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(self.conv(x).flatten(2))

    graph = capture(Net(), torch.zeros(2, 3, 6, 6))
    plans = [Plan.uniform(graph, n=2), shardwise.plan(graph, cluster="2x1Gb")]
    for plan, named in zip(plans, ("", "linalg_svd"), strict=True):
        last = str(plan).splitlines()[-1]
        assert last.startswith(f"no strategy: {named}") and plan.whole[0] in last, last
        assert "whole on one worker" in last and "of 2 workers" in last
    assert "workers" not in str(Plan.uniform(graph, n=1)).splitlines()[-1]


def test_the_last_line_says_that_workers_are_idle() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(2, 3, 6, 6))
    assert str(Plan.uniform(graph, 3, n=2)).endswith(
        "no layer uses more than 2 of 3 workers: more would take longer, or there is nothing more "
        "to split"
    )
    assert "no layer uses" not in str(Plan.uniform(graph, n=2))
