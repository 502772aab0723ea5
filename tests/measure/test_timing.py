"""Measured times: what is timed, how it is kept, and how it is found again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardwise import Plan, capture
from shardwise.cluster.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.geometry.grid import Config
from shardwise.measure.cluster_file import probe
from shardwise.measure.timing import measure_works
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.layer_costs import Roofline
from shardwise.planner.layer_times import (
    Measured,
    TimeTable,
    all_works,
    first_layers,
    timer_for,
    works,
)
from shardwise.specs.model_spec import ModelSpec


class Net(nn.Module):
    """Layers whose shares need sums, gathers, masks and in-place operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3)
        self.group, self.linear = nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.group(self.drop(self.relu(self.norm(self.conv(x)))))
        return self.linear(nn.functional.max_pool2d(x, 3, 2).mean((2, 3))).softmax(1)


GRAPH = capture(Net(), torch.zeros(4, 3, 9, 8))
FIRST = first_layers(GRAPH)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    return tmp_path


def test_only_the_first_layers_need_no_gradient_of_their_input() -> None:
    assert {"x", "conv"} == FIRST


@pytest.mark.parametrize(
    "split", [{"n": 2}, {"h": 2}, {"n": 2, "w": 2}, {"f": 2}, {"c": 2}, {"f": 2, "c": 2}]
)
def test_every_share_of_a_plan_can_be_timed(split: dict[str, int]) -> None:
    plan = Plan.uniform(GRAPH, **split)
    splits = [Split(layer, plan.config(layer, GRAPH), plan.world) for layer in GRAPH.layers]
    wanted = list(all_works(splits, FIRST))
    table = measure_works(wanted, runs=1)
    assert set(table) == {work.key for work in wanted}
    assert all(forward > 0 and backward >= 0 for forward, backward in table.values())


def test_ranks_with_the_same_shapes_share_a_time_and_idle_ranks_have_none() -> None:
    conv = GRAPH["conv"]
    shares, index = works(Split(conv, Config(f=4), 6), False)
    assert len(shares) == 1
    assert index.tolist() == [0, 0, 0, 0, -1, -1]
    shares, index = works(Split(conv, Config(h=2), 2), False)
    assert len(shares) == 2  # 9 rows: 4 and 5


def test_gathered_gradients_are_timed_as_such() -> None:
    linear = GRAPH["linear"]
    plain = works(Split(linear, Config(n=4), 4), True)[0][0]
    gathered = works(Split(linear, Config(n=4, gradient="gather"), 4), True)[0][0]
    assert plain.key != gathered.key
    assert len(measure_works([plain, gathered], runs=1)) == 2


def test_measured_times_are_used_and_the_roofline_elsewhere() -> None:
    device = Cluster.load("local").device
    split = Split(GRAPH["conv"], Config(n=2), 3)
    (work,), _ = works(split, False)
    timer = Measured([{work.key: (1.0, 2.0)}], Roofline(device), FIRST)
    forward, backward = timer.seconds(split)
    assert forward.tolist() == [1.0, 1.0, 0.0]
    assert backward.tolist() == [2.0, 2.0, 0.0]
    other = Split(GRAPH["norm"], Config(n=2), 3)
    assert np.array_equal(timer.seconds(other)[0], Roofline(device).seconds(other)[0])
    each = Measured([{work.key: (1.0, 0.0)}, {work.key: (3.0, 0.0)}], Roofline(device), FIRST)
    assert each.seconds(split)[0].tolist() == [1.0, 3.0, 0.0]


def test_tables_are_kept_on_disk_and_a_broken_one_is_named(cache: Path) -> None:
    table = TimeTable("a device", seconds={"conv": (1.0, 2.0)})
    table.save()
    assert TimeTable.load("a device") == table
    assert list(cache.iterdir()) == [table.path]
    table.path.write_text("{")
    with pytest.raises(ShardwiseError, match=r"times-a-device\.json' cannot be read"):
        TimeTable.load("a device")
    table.path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(ShardwiseError, match="probe again"):
        TimeTable.load("a device")


def test_a_probe_gives_a_cluster_whose_times_are_found(cache: Path, tmp_path: Path) -> None:
    spec = ModelSpec("digits", batch=8)
    cluster = probe([spec], workers=2)
    assert cluster is not None and cluster.world == 2
    assert cluster.links[0].sum_bandwidth is not None and cluster.device.flops > 1e6
    cluster.save(tmp_path / "here.yaml")
    again = Cluster.load(tmp_path / "here.yaml")
    assert again.device == cluster.device
    graph = spec.graph(8)
    timer = timer_for(again, graph)
    assert isinstance(timer, Measured)
    splits = [Split(layer, Config(n=2), 2) for layer in graph.layers if layer.op != "input"]
    wanted = list(all_works(splits, first_layers(graph)))
    assert wanted and not TimeTable.load(cluster.device.name).missing(wanted)


def test_strategies_say_what_they_keep() -> None:
    for name, strategy in STRATEGIES.items():
        assert isinstance(strategy.keeps_inputs, bool), name
        assert strategy.keeps_bytes >= 0, name
