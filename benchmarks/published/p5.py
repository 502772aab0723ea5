"""P5 (swCaffe): speed-ups and shares of communication on 1,024 nodes."""

from __future__ import annotations

import numpy as np

from shardwise import Engine, Plan, simulate
from shardwise.planner.layer_costs import Training
from shardwise.planner.links import Network

from .figures import Paper, Result
from .machines import cluster, network, paced

TRAINING = Training(states=1, output="local", whole_classes=False, statistics="local")
CLUSTER = "taihulight"
CASES = {"alexnet_bn": (256, 128, 64), "resnet50": (64, 32)}
SUMMED = 100e6  # bytes


def run(quick: bool = False) -> Result:
    paper = Paper.load("p5")
    ours = formulas(int(paper.inputs["nodes"]))
    for name, batches in CASES.items():
        for batch in batches[-1:] if quick else batches:
            ours |= scaling(name, batch, paper)
    return paper.compare(ours)


def scaling(name: str, batch: int, paper: Paper) -> dict[str, float]:
    """The speed-up over one node, and the part of the step that is not its computation."""
    nodes, rate = int(paper.inputs["nodes"]), float(paper.inputs["images_per_second"][name])
    machines = cluster(CLUSTER).model_copy(update={"schedules": ("round-robin",)})
    alone, one = network(name, batch), machines.with_workers(1)
    single = Plan.uniform(alone, n=1)
    pace = paced(alone, single, one, TRAINING, batch / rate)
    graph = network(name, batch * nodes)
    machines = machines.with_workers(nodes)
    plan = Plan.uniform(graph, n=nodes)
    trace = simulate(plan, graph, machines, pace, TRAINING, Engine("end"))
    share = float(trace.exposed.max()) / trace.seconds
    return {
        f"{name}-{batch}": nodes * (batch / rate) / trace.seconds,
        f"share-{name}-{batch}": 100.0 * share,
    }


def formulas(nodes: int) -> dict[str, float]:
    """Milliseconds of one sum by the paper's two numberings."""
    found = {}
    for label, schedule in (("formula", "round-robin"), ("formula-old", "halving")):
        machines = cluster(CLUSTER).model_copy(update={"schedules": (schedule,)})
        net = Network(machines.with_workers(nodes))
        found[label] = 1e3 * net.sum_seconds(np.zeros(nodes, dtype=np.int64), SUMMED)
    return found
