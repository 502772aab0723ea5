"""How long planning takes: the costs of all configs, and the search alone, for every zoo network.

    python benchmarks/search.py [--workers 16] [--cluster k80x16] [--networks inception_v3 ...]

Prints layers, the configs of the layer that has most, seconds for all costs, seconds for the search
with costs known (median of five), how the search grows with the number of layers and workers, and
how long a plan of Inception-v3 takes to answer: why not another split, what differs, a pin.
Aims: Inception-v3 on 16 workers in P4's 0.1 s, every network on 16 workers under 2 s and on 1,024
under 30 s; blocks that repeat cost nothing but the search; every answer within 1 s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from results import save
from shardwise import capture, zoo
from shardwise.cluster.cluster import Cluster
from shardwise.graph.layer_graph import LayerGraph
from shardwise.planner.best_plan import Planner
from shardwise.planner.costs import Costs
from shardwise.planner.pins import pinned
from shardwise.planner.planned import examine
from shardwise.planner.search import solve
from shardwise.zoo.resnet import ResNet, bottleneck
from shardwise.zoo.vgg import VGG

HEAD = f"{'network':<16}{'layers':>8}{'workers':>9}{'configs':>9}{'costs s':>10}{'search s':>10}"


def network(name: str, batch: int) -> LayerGraph:
    with torch.device("meta"):
        model = zoo.build(name)
    return capture(model, torch.empty(zoo.input_shape(name, batch), device="meta"))


def chain(blocks: int, batch: int) -> LayerGraph:
    """A VGG with so many convolutions in each of its first four stages."""
    with torch.device("meta"):
        model = VGG(((blocks, 64),) * 4, pooled=2)
    return capture(model, torch.empty(batch, 3, 64, 64, device="meta"))


def resnet(blocks: tuple[int, ...], batch: int) -> LayerGraph:
    with torch.device("meta"):
        return capture(ResNet(bottleneck, blocks), torch.empty(batch, 3, 224, 224))


def answers(graph: LayerGraph, cluster: Cluster) -> dict[str, object]:
    """Seconds of a plan's answers about its middle convolution, the longest of each kind."""
    costs = Costs(graph, cluster)
    plan, planning = timed(lambda: examine(costs, cap=cluster.device.memory))
    convs = [layer.name for layer in graph.layers if layer.op == "conv"]
    asked = [(name, split) for name in convs[:: len(convs) // 6] for split in ("h=4", "n=4 f=4")]
    forced = [timed(lambda a=ask: plan.why_not(*a))[1] for ask in asked]
    differ = [timed(lambda r=r: plan.diff(r.plan))[1] for r in plan.findings.rivals.values()]
    _, pin = timed(lambda: examine(pinned(costs, dict(asked[:1])), cap=cluster.device.memory))
    row = {"plan": planning, "why_not": max(forced), "diff": max(differ), "pin": pin}
    print("  ".join(f"{name} {seconds:.2f} s" for name, seconds in row.items()))
    print(plan.findings.optimality)
    return {**row, "gap": plan.findings.optimality.gap}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def measure(name: str, graph: LayerGraph, cluster: Cluster) -> dict[str, object]:
    """Seconds for all costs and for the search alone."""
    start = time.perf_counter()
    planner = Planner(Costs(graph, cluster))
    problem = planner.problem()
    costs, searches = time.perf_counter() - start, []
    for _ in range(5):
        start = time.perf_counter()
        solve(problem)
        searches.append(time.perf_counter() - start)
    row = {
        "network": name,
        "layers": len(graph.layers),
        "workers": cluster.world,
        "configs": max(len(vector) for vector in problem.costs),
        "costs": costs,
        "search": statistics.median(searches),
    }
    print(
        f"{name:<16}{row['layers']:>8}{row['workers']:>9}{row['configs']:>9}{costs:>10.2f}"
        f"{row['search']:>10.3f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--cluster", default="k80x16")
    parser.add_argument("--networks", nargs="*", default=list(zoo.names()))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    cluster = Cluster.load(arguments.cluster).with_workers(arguments.workers)
    print(f"batch of 32 per worker on {arguments.cluster}\n{HEAD}")
    rows = [
        measure(name, network(name, 32 * arguments.workers), cluster) for name in arguments.networks
    ]
    print(f"\nbatch of 1 per worker on 1,024 workers of taihulight\n{HEAD}")
    large = Cluster.load("taihulight").with_workers(1024)
    rows += [measure(name, network(name, 1024), large) for name in arguments.networks]
    print(f"\nby layers\n{HEAD}")
    for blocks in (2, 4, 8, 16):
        rows.append(measure(f"chain of {4 * blocks}", chain(blocks, 512), cluster))
    print(f"\nby blocks that repeat\n{HEAD}")
    for name, blocks in (("resnet50", (3, 4, 6, 3)), ("resnet152", (3, 8, 36, 3))):
        rows.append(measure(name, resnet(blocks, 32 * arguments.workers), cluster))
    print("\nanswers of a plan of inception_v3 on p100-4x4, the longest of each kind")
    rows.append(answers(network("inception_v3", 512), Cluster.load("p100-4x4")))
    print(f"\nby workers\n{HEAD}")
    for workers in (2, 4, 8, 16, 32, 64):
        flat = Cluster.load(f"{workers}x10Gb")
        rows.append(measure("resnet34", network("resnet34", 32 * workers), flat))
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
