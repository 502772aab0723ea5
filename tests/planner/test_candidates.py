"""The configs that are tried, how they are judged together, and bounds instead of full tables."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from operator_cases import OPERATORS
from shardwise import Config, LayerGraph, PlanError, capture
from shardwise.cluster.cluster import Cluster
from shardwise.geometry.layout import Layout
from shardwise.operators import STRATEGIES, Split
from shardwise.planner import costs as cost_module
from shardwise.planner import transfer_costs as traffic_module
from shardwise.planner.best_plan import Planner, predict
from shardwise.planner.candidates import Candidates, most_workers
from shardwise.planner.costs import Costs, value_operands
from shardwise.planner.layer_costs import LayerCosts, Roofline
from shardwise.planner.layout_columns import Columns, Layouts
from shardwise.planner.links import Network
from shardwise.planner.transfer_costs import Traffic


class Net(nn.Module):
    """A strided convolution, a norm, branches that are added and concatenated, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 32, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.left, self.right = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 16, 1)
        self.head = nn.Linear(48, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = torch.cat([self.left(x) + x, self.right(x)], 1)
        return self.head(x.mean((2, 3)))


def net_graph(batch: int, size: int = 64) -> LayerGraph:
    with torch.device("meta"):
        return capture(Net(), torch.empty(batch, 8, size, size))


GRAPH = net_graph(256)


@cache
def operator_graphs() -> dict[str, LayerGraph]:
    """Every operator, as one small model each."""
    return {
        name: capture(module.double(), torch.zeros(shape, dtype=torch.float64))
        for name, (module, shape) in OPERATORS.items()
    }


def every(graph: LayerGraph, world: int) -> dict[str, tuple[Config, ...]]:
    candidates = Candidates.of(graph, world)
    return {la.name: candidates.configs(la, graph.batch) for la in graph.layers}


# -- which configs are tried -----------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 6, 16])
def test_every_config_is_legal(world: int) -> None:
    for graph in operator_graphs().values():
        for name, configs in every(graph, world).items():
            assert configs and Config() in configs
            for config in configs:
                STRATEGIES[graph[name].op].check(graph[name], config, world)


@pytest.mark.parametrize("world", [1, 2, 6, 12, 16, 24, 128, 1024])
def test_the_number_of_workers_divides_the_world_or_the_power_of_two_below(world: int) -> None:
    below = 1 << (world.bit_length() - 1)
    for configs in every(GRAPH, world).values():
        assert len(set(configs)) == len(configs)
        for config in configs:
            count = config.num_workers
            assert world % count == 0 or below % count == 0, config
        assert [c.num_workers for c in configs] == sorted(c.num_workers for c in configs)[::-1]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_no_more_parts_than_samples(batch: int) -> None:
    for configs in every(net_graph(batch, 32), 16).values():
        most = max(config.n for config in configs)
        assert most == 1 << (batch.bit_length() - 1)


def test_on_large_clusters_height_and_width_are_split_together() -> None:
    configs = every(GRAPH, 1024)["stem"]
    assert max(config.h * config.w for config in configs) == 1024
    assert all(config.h in (config.w, 2 * config.w) for config in configs)
    assert any(config.h != config.w for config in every(GRAPH, 16)["stem"])


def test_a_dimension_that_is_too_small_leaves_its_share_to_the_other() -> None:
    with torch.device("meta"):
        graph = capture(nn.Conv2d(8, 8, 3, padding=1), torch.empty(64, 8, 2, 512))
    configs = every(graph, 256)["conv2d"]
    assert any(config.h == 2 and config.w == 128 for config in configs)
    assert all(config.h <= 2 for config in configs)


def test_fewer_workers_are_close_or_spread_on_small_clusters_and_spread_on_large_ones() -> None:
    small = {config.ranks for config in every(GRAPH, 16)["stem"] if config.num_workers == 4}
    assert small == {(0, 1, 2, 3), (0, 4, 8, 12)}
    large = {config.ranks for config in every(GRAPH, 128)["stem"] if config.num_workers == 4}
    assert large == {(0, 32, 64, 96)}


def test_the_space_stays_small() -> None:
    for world in (64, 96, 256, 1000, 1024, 4096):
        assert max(map(len, every(GRAPH, world).values())) <= 512


def test_layers_with_the_same_configs_share_them() -> None:
    found = every(GRAPH, 16)
    assert found["norm"] is found["relu"]


def test_workers_that_no_layer_can_use_are_an_error() -> None:
    with pytest.raises(PlanError, match="the most that a layer can use is 4, so give --workers 4"):
        most_workers({"a": (Config(n=2), Config(f=4)), "b": (Config(),)}, 8)


# -- many at once ----------------------------------------------------------------------------------


def assert_same(together: LayerCosts, place: int, alone: LayerCosts, where: str) -> None:
    for field in fields(LayerCosts):
        ours, theirs = (getattr(costs, field.name) for costs in (together, alone))
        if isinstance(ours, np.ndarray):
            assert ours[place] == pytest.approx(theirs[0], rel=1e-12), f"{where}: {field.name}"
    pairs = zip((together.outputs, *together.needs), (alone.outputs, *alone.needs), strict=True)
    for ours, theirs in pairs:
        if ours is not None and theirs is not None:
            assert ours.one(place).key == theirs.one(0).key, where


@pytest.mark.parametrize("cluster", ["3@1Gb", "2x4@1Gb/4:1"])
def test_configs_that_are_judged_together_cost_what_each_costs_alone(cluster: str) -> None:
    for name, graph in operator_graphs().items():
        costs = Costs(graph, Cluster.load(cluster))
        for layer in graph.layers:
            together = costs.of(layer)
            for place in range(0, len(together.configs), 3):
                config = together.configs[place]
                alone = costs.under(layer, (config,))
                assert_same(together, place, alone, f"{name}: {layer.name} {config}")


def test_a_timer_other_than_the_roofline_is_asked_by_the_axes_that_are_split() -> None:
    class Recording:
        def __init__(self) -> None:
            self.roofline, self.splits = Roofline(Cluster.load("local").device), list[Split]()

        def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
            self.splits.append(split)
            return self.roofline.seconds(split)

    timer = Recording()
    costs = Costs(GRAPH, Cluster.load("8@1Gb"), timer)
    costs.of(GRAPH["stem"])
    for split in timer.splits:
        assert split.stack is not None
        patterns = {tuple(k > 1 for k in config.degrees) for config in split.stack.configs}
        assert len(patterns) == 1
    assert sum(len(split.stack.configs) for split in timer.splits if split.stack) > 50


def test_columns_give_back_the_boxes_they_are_made_of() -> None:
    columns, world = Columns(8), 8
    layer, candidates = GRAPH["stem"], Candidates.of(GRAPH, 8)
    configs = candidates.configs(layer, GRAPH.batch)
    needs = [STRATEGIES[layer.op].needs(Split.of(layer, c, world))[0].layout for c in configs]
    bounds = np.stack([layout.bounds for layout in needs])
    layouts = Layouts.of(columns, columns.of(bounds))
    assert (layouts.boxes(layouts.index) == bounds).all()
    assert columns.count < 2 * len(layouts)  # of four columns each
    shape = layer.operands[0].shape
    inside = layouts.inside(shape)
    assert (inside.boxes(inside.index) == np.clip(bounds, 0, np.array(shape)[:, None])).all()


def test_a_box_beyond_the_tensor_is_empty_in_all_dimensions() -> None:
    bounds = np.array([[[0, 4], [2, 3]], [[0, 4], [3, 5]]])
    columns = Columns(2)
    layouts = Layouts.of(columns, columns.of(bounds[None])).inside((4, 3))
    assert layouts.boxes(layouts.index).tolist() == [[[[0, 4], [2, 3]], [[0, 0], [0, 0]]]]


# -- bounds ----------------------------------------------------------------------------------------

LARGE = ["8x8@1Gb/4:1", "6x4@1Gb/2:1", "128@1Gb", "2x4x4@1Gb/2:1/8:1"]


@pytest.mark.parametrize("cluster", LARGE)
def test_on_large_clusters_transfers_take_at_least_what_some_ranks_need(cluster: str) -> None:
    costs = Costs(GRAPH, Cluster.load(cluster))
    assert costs.world > traffic_module.MANY
    for layer in GRAPH.layers:
        for operand, name in value_operands(layer):
            if GRAPH[name].op != "input":
                held, needed, passes = costs._ends(GRAPH[name], layer, operand)
                full = costs.traffic.table(held, needed).seconds * passes
                exact = full[np.ix_(held.index, needed.index)]
                least = costs.least_edge(GRAPH[name], layer, operand)
                assert (least <= exact * (1 + 1e-9)).all(), f"{name} -> {layer.name}"
                assert np.isclose(least, exact).mean() > 0.5, f"{name} -> {layer.name}"


@pytest.mark.parametrize("cluster", LARGE)
def test_bounds_lead_to_the_plan_that_full_tables_lead_to(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Cluster.load(cluster)
    costs = Costs(GRAPH, machines)
    bounded = [predict(Planner(costs).best(hidden), costs) for hidden in (0.0, 1.0)]
    monkeypatch.setattr(traffic_module, "MANY", 10**6)
    monkeypatch.setattr(cost_module, "MANY", 10**6)
    costs = Costs(GRAPH, machines)
    for hidden, found in zip((0.0, 1.0), bounded, strict=True):
        full = predict(Planner(costs).best(hidden), costs)
        expected = full.seconds - hidden * full.update
        assert found.seconds - hidden * found.update == pytest.approx(expected, rel=1e-9)


def test_the_shared_medium_of_a_large_cluster_is_sampled_by_whole_groups() -> None:
    links = [
        {"name": "bus", "count": 8, "shared": True, "latency": 1e-6, "bandwidth": 1e9},
        {"name": "net", "count": 8, "latency": 1e-6, "bandwidth": 1e9},
    ]
    device = Cluster.load("local").device.model_dump()
    machines = Cluster.model_validate({"name": "buses", "device": device, "links": links})
    columns, traffic = Columns(64), Traffic(Network(machines), 4)
    ports = traffic.ports(sampled=True)[0]
    assert np.unique(ports.ranks // 8, return_counts=True)[1].tolist() == [8, 8]
    halves = Layout.of((64, 4), [np.arange(64)[:, None] + [0, 1], np.tile([0, 4], (64, 1))])
    rows = columns.of(np.stack([halves.bounds, Layout.replicated((64, 4), 64).bounds]))
    layouts = Layouts.of(columns, rows)
    exact = traffic.table(layouts, layouts).seconds[:1]
    assert traffic.table(layouts, layouts, sampled=True).seconds[:1] == pytest.approx(exact)
