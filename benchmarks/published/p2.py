"""P2 (LBANN): Table 1's speed-ups with channels and filters split, and segmented all-reduces."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from shardwise import Cluster, Config, Engine, Layer, LayerGraph, Plan, simulate
from shardwise.planner.layer_costs import Roofline, Training
from shardwise.planner.links import Network
from shardwise.plans.fitting import fit

from .figures import Paper, Result
from .machines import cluster, network, paced

TRAINING = Training(states=1, output="local", whole_classes=False, statistics="local")
CLUSTER = "lassen"
SPATIAL = 56  # rows of the blocks conv_1 and conv_2, which are split by height
QUICK = 4  # groups of samples, where few are enough to see that it works
WEIGHTS = 128 * 128 * 9 * 4.0  # bytes of a convolution of conv_3


def run(quick: bool = False) -> Result:
    paper = Paper.load("p2")
    ours = segmented(1024)
    for name, case in paper.inputs["cases"].items():
        if not quick or name == "resnet50":
            ours |= table_1(name, case, paper.inputs, QUICK if quick else paper.inputs["groups"])
    return paper.compare(ours)


# -- Table 1 ---------------------------------------------------------------------------------------


def table_1(
    name: str, case: dict[str, Any], inputs: dict[str, Any], groups: int
) -> dict[str, float]:
    """The speed-up over sample parallelism, at the pace of Table 1 and at the preset's."""
    share = case["batch"] // inputs["groups"]
    graph = network(name, share * groups)
    few, many = (cluster(CLUSTER).with_workers(groups * ways) for ways in (1, case["ways"]))
    steps = inputs["epochs"] * inputs["images"] / case["batch"]
    theirs = 60.0 * case["minutes"] / steps
    samples, split = Plan.uniform(graph, n=groups), hybrid(graph, groups, case)
    pace = paced(graph, samples, few, TRAINING, theirs)
    slow, fast = (_step(samples, graph, few, t) for t in (pace, Roofline(few.device)))
    hybrid_slow, hybrid_fast = (_step(split, graph, many, t) for t in (pace, Roofline(few.device)))
    return {
        name: slow / hybrid_slow,
        f"{name}-minutes": hybrid_slow * steps / 60.0,
        f"{name}-preset": fast / hybrid_fast,
    }


def _step(plan: Plan, graph: LayerGraph, machines: Cluster, timer: Roofline) -> float:
    return simulate(plan, graph, machines, timer, TRAINING, Engine("layer")).seconds


def hybrid(graph: LayerGraph, groups: int, case: dict[str, Any]) -> Plan:
    """Height in the first blocks; then channels, filters, or both, inside each group."""
    ways = case["ways"]
    both = Config(n=groups, c=ways // 2, f=2)
    channels, filters = Config(n=groups, c=ways), Config(n=groups, f=ways)

    def choose(layer: Layer) -> Config:
        if len(layer.shape) == 4 and layer.shape[2] >= SPATIAL:
            return fit(layer, Config(n=groups, h=ways), graph.batch)
        if layer.op != "conv":
            return fit(layer, filters, graph.batch)
        if case["stationary"] == "w":
            return fit(layer, both, graph.batch)
        read = next(operand.shape for operand in layer.operands if operand.kind == "value")
        return fit(layer, filters if prod(layer.shape) > prod(read) else channels, graph.batch)

    return Plan.make(graph, groups * ways, choose)


# -- segmented all-reduces -------------------------------------------------------------------------


def segmented(gpus: int, segments: int = 8) -> dict[str, float]:
    """How much faster a layer's sum is when disjoint groups sum a part each."""
    rings = cluster(CLUSTER).model_copy(update={"schedules": ("ring",)}).with_workers(gpus)
    net = Network(rings)
    whole = net.sum_seconds(np.zeros(gpus, dtype=np.int64), WEIGHTS)
    part = net.sum_seconds(np.arange(gpus) % segments, WEIGHTS / segments)
    return {f"segmented-{segments}": whole / part}
