"""Mutated settings, plans, cluster files and traces: one sentence, or something that is valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mutations import mutate
from shardwise import Cluster, Plan, capture, zoo
from shardwise.errors import ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.plans.trace import Trace
from shardwise.training.settings import Settings, read_settings

ROUNDS = 150
SETTINGS = """\
model: resnet34_cifar
options: {num_classes: 7}
data: synthetic:100x3x32x32
mean: [0.5, 0.4, 0.3]
lr: 1e-3
milestones: [3, 5.5]
epochs: 12
split: n=2,h=2
precision: bf16
resume: true
"""
CLUSTERS = ("taihulight", "2x4@1Gb/4:1")


def graph() -> LayerGraph:
    return capture(zoo.build("digits", width=4), torch.empty(6, 1, 8, 8))


def read_plan(path: Path, model: LayerGraph) -> None:
    """What is accepted must fit the model, and be the same when it is written and read again."""
    plan = Plan.load(path)
    try:
        plan.check(model)
    except ShardwiseError as error:
        assert "\n" not in str(error)
        return
    assert Plan.from_json(plan.to_json()) == plan


def read_cluster(path: Path, _: Any) -> None:
    cluster = Cluster.load(path)
    assert cluster.world >= 1 and cluster.device.flops > 0
    again = path.with_name("again.yaml")
    cluster.save(again)
    assert Cluster.load(again).model_dump(exclude={"name"}) == cluster.model_dump(exclude={"name"})


def read_config(path: Path, _: Any) -> None:
    found = read_settings(path)
    assert Settings.model_validate(found.model_dump()) == found


def read_trace(path: Path, _: Any) -> None:
    assert np.isfinite(Trace.load(path).seconds)


def fuzz(path: Path, read: Callable[[Path, Any], None], with_: Any = None, seed: int = 0) -> int:
    """Reads mutated copies of a file; returns how many were refused."""
    refused, folder = 0, path.parent / "mutated"
    folder.mkdir()
    read(path, with_)
    for number in range(ROUNDS):
        copy = folder / path.name
        for old in folder.iterdir():
            old.unlink()
        copy.write_bytes(path.read_bytes())
        done = mutate(folder, np.random.default_rng((seed, number)))
        try:
            read(copy, with_)
        except ShardwiseError as error:
            assert "\n" not in str(error) and str(copy) in str(error), done
            refused += 1
    return refused


def test_mutated_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS)
    assert fuzz(path, read_config) > ROUNDS // 4


@pytest.mark.parametrize("seed", [0, 1])
def test_mutated_plans(tmp_path: Path, seed: int) -> None:
    model, path = graph(), tmp_path / "plan.json"
    Plan.random(model, 4, seed).save(path)
    assert fuzz(path, read_plan, model, seed) > ROUNDS // 4


@pytest.mark.parametrize("name", CLUSTERS)
def test_mutated_clusters(tmp_path: Path, name: str) -> None:
    path = tmp_path / "cluster.yaml"
    Cluster.load(name).save(path)
    assert fuzz(path, read_cluster) > ROUNDS // 4


def test_mutated_traces(tmp_path: Path) -> None:
    spans = [
        ("conv", "forward", "compute", 0.0, 1.5, None),
        ("sum", "sums", "gradients", 1, 2, 0.5),
    ]
    path = tmp_path / "trace.json"
    Trace.of_ranks([spans, spans]).save(path)
    assert fuzz(path, read_trace) > ROUNDS // 4
