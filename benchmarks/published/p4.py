"""P4 (DeePa): Tables 2 and 3, fewer bytes, and the speed-ups over TensorFlow and PyTorch."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from shardwise import Cluster, Config, Engine, Layer, LayerGraph, Plan, capture, simulate
from shardwise.planner.best_plan import Planner, predict
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.planned import HIDDEN, Alternative, examine
from shardwise.plans.fitting import fit

from .figures import Paper, Result
from .machines import Paced, cluster, network, paced

GPUS = 16
BATCH = 512
NETWORKS = ("alexnet", "vgg16", "inception_v3")
TRAINING = Training(states=0, output="local", whole_classes=False, statistics="local")
TABLE_3 = {
    "n16": {"n": 16},
    "n8": {"n": 8},
    "n4": {"n": 4},
    "h2w2": {"h": 2, "w": 2},
    "n2": {"n": 2},
}

LAST_THREE = ("conv1", "conv2", "conv3")


def run(quick: bool = False) -> Result:
    """All figures; the quick ones need no large network."""
    paper = Paper.load("p4")
    ours = table_2() | table_3()
    if not quick:
        ours |= fewer_bytes(int(paper.inputs["classes_22k"]))
        ours |= speedups(paper)
    return paper.compare(ours)


# -- the tables ------------------------------------------------------------------------------------


def table_2() -> dict[str, float]:
    """Milliseconds of a 4096 to 4096 linear layer after convolutions, and its best split."""
    net = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 64, 5, padding=2),
            conv2=nn.Conv2d(64, 64, 5, padding=2),
            conv3=nn.Conv2d(64, 64, 5, padding=2),
            pool=nn.AvgPool2d(8),
            flatten=nn.Flatten(),
            fc=nn.Linear(4096, 4096),
        )
    ).to("meta")
    graph = capture(net, torch.empty(BATCH, 3, 64, 64, device="meta"))
    planned = examine(Costs(graph, cluster("k80x16")))
    found = {a.config: a for a in planned.explain("fc")}
    splits = {"n16": Config(n=16)} | {f"f{k}": Config(f=k) for k in (16, 4, 2, 1)}
    costs = {f"t2-{name}": 1e3 * _own_cost(found[config]) for name, config in splits.items()}
    return costs | {"t2-best": float(planned.layers["fc"].num_workers)}


def _own_cost(found: Alternative) -> float:
    """Without what readers pay, as in P4's tables."""
    return found.transfer + found.compute + found.update


def table_3() -> dict[str, float]:
    """Milliseconds of VGG-16's last three convolutions between layers on all GPUs."""
    convs = {f"conv{i}": nn.Conv2d(512, 512, 3, padding=1, bias=False) for i in range(5)}
    graph = capture(
        nn.Sequential(OrderedDict(convs)).to("meta"),
        torch.empty(BATCH, 512, 14, 14, device="meta"),
    )
    costs = Costs(graph, cluster("k80x16"), training=TRAINING)
    found = {}
    for name, degrees in TABLE_3.items():
        rows = {row.layer: row for row in predict(_between(graph, Config(**degrees)), costs).rows}
        inside = sum(rows[layer].total for layer in LAST_THREE)
        found[f"t3-{name}"] = 1e3 * (inside + rows["conv4"].transfer)
    return found


def _between(graph: LayerGraph, split: Config) -> Plan:
    """The three layers under this split, those around them by image on all GPUs."""

    def choose(layer: Layer) -> Config:
        return fit(layer, split if layer.name in LAST_THREE else Config(n=GPUS), graph.batch)

    return Plan.make(graph, GPUS, choose)


# -- bytes -----------------------------------------------------------------------------------------


def fewer_bytes(classes: int) -> dict[str, float]:
    """How many times fewer bytes a step moves than under image parallelism."""
    found = {}
    for label, graph in (
        ("bytes", network("alexnet", BATCH)),
        ("bytes-22k", network("alexnet", BATCH, classes)),
    ):
        costs = Costs(graph, cluster("k80x16"), training=TRAINING)
        images = predict(Plan.uniform(graph, n=GPUS), costs).moved
        for name, plan in (("their", deepa(graph)), ("our", Planner(costs).best())):
            found[f"{label}-{name}-plan"] = images / predict(plan, costs).moved
    return found


def deepa(graph: LayerGraph) -> Plan:
    """DeePa's AlexNet: convolutions by image on all GPUs, the rest by channel on two."""
    trick = Plan.owt(graph, GPUS)
    return Plan.make(
        graph,
        GPUS,
        lambda layer: fit(
            layer, Config(f=2) if trick.layers[layer.name].f > 1 else Config(n=GPUS), graph.batch
        ),
    )


# -- speed-ups -------------------------------------------------------------------------------------


def speedups(paper: Paper) -> dict[str, float]:
    """DeePa over TensorFlow and PyTorch, on both machines."""
    found = {}
    for label, gpu, links, host, gpus in (
        ("k80x16", "K80", "k80x16", "k80x16", 16),
        ("k80-pcie", "K80", "k80-pcie", "k80-pcie-host", 16),
        ("p100-1x4", "P100", "p100-4x4", "p100-4x4-host", 4),
        ("p100-4x4", "P100", "p100-4x4", "p100-4x4-host", 16),
    ):
        machines, theirs = (cluster(name).with_workers(gpus) for name in (links, host))
        for name in NETWORKS:
            batch, rate = paper.inputs["images_per_second"][gpu][name]
            one = network(name, batch)
            alone = Plan.uniform(one, n=1)
            pace = paced(one, alone, machines.with_workers(1), TRAINING, batch / rate)
            graph = network(name, 32 * gpus)
            found[f"{label}-{name}"] = speedup(graph, machines, theirs, pace)
    return found


def speedup(graph: LayerGraph, machines: Cluster, theirs: Cluster, pace: Paced) -> float:
    """The planner's best plan against image parallelism through the host's memory."""
    images = Plan.uniform(graph, n=machines.world)
    slow = simulate(images, graph, theirs, pace, TRAINING, Engine("end")).seconds
    planner = Planner(Costs(graph, machines, pace, TRAINING))
    plans = [planner.best(hidden) for hidden in HIDDEN]
    plans += [images, Plan.owt(graph, machines.world)]
    steps = [simulate(p, graph, machines, pace, TRAINING, Engine("layer")).seconds for p in plans]
    return slow / min(steps)
