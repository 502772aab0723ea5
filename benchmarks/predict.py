"""Predicted against measured step times of ten plans of VGG-A and ResNet-34, on local workers.

    python benchmarks/predict.py [--workers 2] [--batch 32] [--rounds 9]

In every round the machine is probed (layers as the plans need them, on every rank; links), and one
step of each plan is run. The overheads of messages amid computation come from three other plans,
run in the same rounds. Prints the median of the steps that are simulated from each round's times,
the median of the measured ones with its quartiles, and the error. The aim is 10 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from results import save
from shardwise import Plan, capture, parallelize, run_local, zoo
from shardwise.cluster.cluster import Cluster
from shardwise.comm import Communicator
from shardwise.graph.layer_graph import LayerGraph
from shardwise.measure.cluster_file import Step, calibrated, calibration_plans
from shardwise.measure.timing import Speeds, device_name, measure_speeds, measure_works, to_cluster
from shardwise.operators import Split
from shardwise.planner.best_plan import Planner
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Roofline, Training
from shardwise.planner.layer_times import Measured, Work, all_works, first_layers
from shardwise.planner.simulate import simulate
from shardwise.zoo.vgg import VGG, VGG11

NETWORKS = ("vgg_a", "resnet34")
SIZE = 64  # of images
AIM = 0.10


def build(name: str) -> torch.nn.Module:
    """The networks for small images; VGG-A's fully connected layers shrink with them."""
    torch.manual_seed(0)
    if name == "vgg_a":
        return VGG(VGG11, num_classes=10, hidden=2048, pooled=2)
    return zoo.build(name, num_classes=10)


def inputs(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def uniform_plans(graph: LayerGraph, world: int) -> dict[str, Plan]:
    """Plans of all kinds."""
    splits = [{"n": world}, {"h": world}, {"w": world}, {"f": world}, {"c": world}]
    plans = {
        ",".join(f"{a}={k}" for a, k in split.items()): Plan.uniform(graph, world, **split)
        for split in splits
    }
    plans["one worker"] = Plan.uniform(graph, world, n=1)
    plans["owt"] = Plan.owt(graph, world)
    return plans | {f"random {seed}": Plan.random(graph, world, seed) for seed in (1, 2)}


@dataclass
class Round:
    """What one rank measured in one round."""

    speeds: Speeds
    layers: dict[str, tuple[float, float]]
    steps: list[float]  # one per plan


def measure(
    name: str, batch: int, plans: list[Plan], wanted: list[Work], rounds: int
) -> list[Round]:
    """Probes and steps in turn, round after round: the machine may be slower a minute later."""
    comm, x = Communicator(), inputs(batch)
    y = torch.randint(0, 10, (batch,), generator=torch.Generator().manual_seed(1))
    models = []
    for plan in plans:
        model = parallelize(build(name), plan)
        models.append((model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)))
    found = []
    for _ in range(rounds + 1):
        speeds = measure_speeds(comm)
        comm.gather_objects(None)
        layers, steps = measure_works(wanted, runs=1), []
        for model, optimizer in models:
            comm.gather_objects(None)
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            comm.gather_objects(None)
            steps.append(time.perf_counter() - start)
        found.append(Round(speeds, layers, steps))
    return found[1:]


def compare(name: str, workers: int, batch: int, rounds: int) -> list[dict[str, object]]:
    graph = capture(build(name), inputs(batch))
    first, training = first_layers(graph), Training(states=1)
    plans = uniform_plans(graph, workers)
    local = Cluster.load("local").with_workers(workers)
    plans["planned"] = Planner(Costs(graph, local, training=training)).best()
    count = len(plans)
    others = calibration_plans(graph, workers)
    plans |= {f"to calibrate {number}": plan for number, plan in enumerate(others)}
    splits = [
        Split(layer, plan.config(layer, graph), workers)
        for plan in plans.values()
        for layer in graph.layers
    ]
    wanted = list({work.key: work for work in all_works(splits, first)}.values())
    ranks = run_local(measure, workers, name, batch, list(plans.values()), wanted, rounds)
    found = [r for rank in ranks for r in rank]
    cluster = to_cluster([r.speeds for r in found], "probed", device_name(1), 4 << 30)
    cluster = cluster.with_workers(workers)
    timers = [
        Measured([rank[i].layers for rank in ranks], Roofline(cluster.device), first)
        for i in range(rounds)
    ]
    measured = [
        [max(rank[i].steps[place] for rank in ranks) for i in range(rounds)]
        for place in range(len(plans))
    ]
    cluster = calibrated(
        cluster,
        [
            Step(plan, graph, timer, training, steps[i])
            for plan, steps in list(zip(plans.values(), measured, strict=True))[count:]
            for i, timer in enumerate(timers)
        ],
    )
    link = cluster.links[0]
    print(
        f"{name}, batch {batch}, {workers} workers: {len(wanted)} shares timed\n"
        f"  messages {1e6 * link.latency:.0f} us and {1e6 * link.post:.0f} us of own time, "
        f"{link.bandwidth / 1e9:.2f} GB/s; sums {1e6 * (link.sum_latency or 0):.0f} us, "
        f"{(link.sum_bandwidth or 0) / 1e9:.2f} GB/s, {100 * link.overlap:.0f} % hidden; memory "
        f"{cluster.device.memory_bandwidth / 1e9:.1f} GB/s"
    )
    rows = []
    for (label, plan), steps in list(zip(plans.items(), measured, strict=True))[:count]:
        simulated = [simulate(plan, graph, cluster, timer, training).seconds for timer in timers]
        predicted = statistics.median(simulated)
        low, median, high = statistics.quantiles(steps, n=4)
        error = predicted / median - 1
        rows.append(
            {"network": name, "plan": label, "predicted": predicted, "measured": median}
            | {"quartiles": [low, high], "error": error}
        )
        print(
            f"  {label:<12} predicted {1e3 * predicted:7.1f} ms   measured {1e3 * median:7.1f} ms "
            f"({1e3 * low:.1f} to {1e3 * high:.1f})   error {100 * error:+.1f} %"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.networks:
        rows += compare(name, arguments.workers, arguments.batch, arguments.rounds)
    errors = sorted(abs(float(row["error"])) for row in rows)  # type: ignore[arg-type]
    within = sum(error <= AIM for error in errors)
    print(
        f"{within} of {len(rows)} plans within {100 * AIM:.0f} %; median error "
        f"{100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.1f} %"
    )
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
