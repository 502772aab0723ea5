"""What computing layers again buys: the largest volume that four workers train on under a limit.

    python benchmarks/recompute.py [--network full|unet3d] [--depth 48] [--side 64]

Trains a network on a volume with all kept, and takes the peak of that as the limit: what the
process holds beyond what it held before the model was built. Then volumes grow in depth as long as
the same split stays under the limit with layers computed again. The aims: 1.6 times the volume,
and at most 1.35 times the step on the same volume; steps of both take turns. The network is one
that keeps the resolution (convolution, batch norm and ReLU 12 times, as HighRes3DNet), or the 3-D
U-Net, of which the finest level is there twice while its gradients are computed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from statistics import median

import torch
from torch import nn

from results import save
from shardwise import Plan, capture, parallelize, zoo
from shardwise.cluster.cluster import Cluster
from shardwise.geometry.box import Box
from shardwise.launch.workers import run_local
from shardwise.planner.best_plan import predict, size
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.recompute import all_again
from shardwise.specs.plan_spec import parse_split

CHANNELS, MULTIPLE = (16, 32, 64), 8
TRAINING = Training(states=1, output="local")
Shape = tuple[int, ...]


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "unet3d":
        return zoo.build("unet3d", channels=CHANNELS)
    layers: list[nn.Module] = []
    for channels in (1, *[16] * 11):
        layers += [nn.Conv3d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm3d(16)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv3d(16, 3, 1))


class Trained:
    """A parallel network, and a step of its training on a random volume."""

    def __init__(self, name: str, plan: Plan, shape: Shape) -> None:
        model = self.model = parallelize(network(name), plan, output="local")
        cut = model.output_box(shape[0]).slices_in(Box.whole((shape[0], 3, *shape[2:])))
        self.x = torch.randn(shape)[model.input_box(shape[0]).slices_in(Box.whole(shape))].clone()
        self.y = torch.randint(0, 3, (shape[0], *shape[2:]))[cut[:1] + cut[2:]].clone()
        self.batch = shape[0]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> float:
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        output = self.model(self.x, batch=self.batch)
        torch.nn.functional.cross_entropy(output, self.y, reduction="mean").backward()
        del output
        self.optimizer.step()
        return time.perf_counter() - begin


def peak(name: str, plan: Plan, shape: Shape) -> int:
    """The most that this rank holds while it trains, beyond what it held at the start."""
    warm = torch.nn.Conv3d(2, 2, 3)(torch.zeros(1, 2, 8, 8, 8, requires_grad=True))
    warm.sum().backward()  # libraries are loaded
    del warm
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    trained = Trained(name, plan, shape)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        trained.step()
    return resident("VmHWM") - before


def seconds(name: str, plans: Sequence[Plan], shape: Shape, repeats: int) -> list[list[float]]:
    """The steps of several plans, which take turns."""
    each = [Trained(name, plan, shape) for plan in plans]
    return [[trained.step() for trained in each] for _ in range(repeats + 1)][1:]


def plans(name: str, shape: Shape, split: dict[str, int]) -> tuple[Plan, Plan, Costs]:
    """With all kept, and with all computed again that frees memory."""
    graph = capture(network(name), torch.zeros(shape))
    cluster = Cluster.load("local").with_workers(prod(split.values()))
    costs = Costs(graph, cluster, training=TRAINING)
    keeps = Plan.uniform(graph, **split)
    return keeps, all_again(keeps, costs), costs


def largest(name: str, shape: Shape, split: dict[str, int], limit: int) -> dict[int, int]:
    """The peaks of volumes that grow until one is over the limit, by their depths."""
    found: dict[int, int] = {}
    depth, *sides = shape[2:]
    while not found or max(found.values()) <= limit:
        shape = (1, 1, depth, *sides)
        _, again, costs = plans(name, shape, split)
        found[depth] = max(run_local(peak, again.world, name, again, shape))
        told = size(predict(again, costs).memory)
        print(f"again, depth {depth}: measured {size(found[depth])}, predicted {told}", flush=True)
        depth += MULTIPLE
    return {depth: nbytes for depth, nbytes in found.items() if nbytes <= limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=("full", "unet3d"), default="full")
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--split", default="h=2,w=2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    split, shape = parse_split(arguments.split), (1, 1, arguments.depth, *[arguments.side] * 2)
    name = arguments.network
    keeps, again, costs = plans(name, shape, split)
    limit = max(run_local(peak, keeps.world, name, keeps, shape))
    told = size(predict(keeps, costs).memory)
    print(f"kept, depth {arguments.depth}: measured {size(limit)} (the limit), predicted {told}")
    fitting = largest(name, shape, split, limit)
    growth = max(fitting, default=0) / arguments.depth
    times = run_local(seconds, keeps.world, name, [keeps, again], shape, arguments.repeats)[0]
    ratios = sorted(again / kept for kept, again in times)
    kept, more = (median(column) for column in zip(*times, strict=True))
    print(f"volume under the limit: {growth:.2f} times (aim: at least 1.6)")
    print(
        f"step: {kept:.3f} s with all kept, {more:.3f} s; ratio {median(ratios):.2f}, from "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} (aim: at most 1.35)"
    )
    save(arguments.json, {"limit": limit, "again": fitting, "growth": growth, "seconds": times})


if __name__ == "__main__":
    main()
