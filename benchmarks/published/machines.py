"""What all papers need: captured networks, clusters beside the presets, and a device's own pace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shardwise import Cluster, Engine, LayerGraph, Plan, Trace, capture, simulate, zoo
from shardwise.operators import Split
from shardwise.planner.layer_costs import Roofline, Training

from .figures import HERE


@lru_cache(maxsize=32)
def network(name: str, batch: int, classes: int | None = None) -> LayerGraph:
    """The layers of a network of the zoo; its weights are never made."""
    with torch.device("meta"):
        model = zoo.build(name) if classes is None else zoo.build(name, num_classes=classes)
    return capture(model, torch.empty(zoo.input_shape(name, batch), device="meta"))


def cluster(name: str) -> Cluster:
    """A preset, or one of the clusters in this folder."""
    own = HERE / "clusters" / f"{name}.yaml"
    return Cluster.load(own if own.exists() else name)


@dataclass(frozen=True)
class Paced(Roofline):
    """The roofline, so many times slower: one device then takes what was measured on it."""

    factor: float = 1.0

    def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = super().seconds(split)
        return forward * self.factor, backward * self.factor


def paced(
    graph: LayerGraph, plan: Plan, machines: Cluster, training: Training, seconds: float
) -> Paced:
    """The pace at which this plan's step takes so many seconds, its communication hidden."""
    roofline = Roofline(machines.device)
    trace = simulate(plan, graph, machines, roofline, training, Engine("layer"))
    computing = float((trace.kinds["forward"] + trace.kinds["backward"]).max())
    factor = (seconds - (trace.seconds - computing)) / computing
    return Paced(machines.device, factor=factor)


def alone(graph: LayerGraph, machines: Cluster, training: Training) -> Trace:
    """A step on one worker."""
    return simulate(Plan.uniform(graph, n=1), graph, machines.with_workers(1), training=training)
