"""A memory cap that sample parallelism breaks: the 3-D U-Net planned under it, and really run.

    python benchmarks/memory_cap.py [--workers 4] [--batch 2] [--size 48] [--share 0.6]

Plans the U-Net with `memory` set to a share of what sample parallelism needs, trains three steps
under both plans, and prints the predicted and the measured peak of every rank: what the process
holds beyond what it held before the model was built (weights, gradients, optimizer, activations,
buffers and the libraries' scratch space). The aim is a measured peak below the cap.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

import torch

from results import save
from shardwise import Plan, capture, parallelize, zoo
from shardwise.cluster.cluster import Cluster
from shardwise.geometry.box import Box
from shardwise.launch.workers import run_local
from shardwise.planner.best_plan import Planner, predict, size
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.simulate import simulate

TRAINING = Training(states=1, output="local")


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def peak(plan: Plan, shape: tuple[int, ...]) -> int:
    """The most that this rank holds while it trains, beyond what it held at the start."""
    warm = torch.nn.Conv3d(2, 2, 3)(torch.zeros(1, 2, 8, 8, 8, requires_grad=True))
    warm.sum().backward()  # libraries are loaded
    del warm
    model = parallelize(zoo.build("unet3d"), plan, output="local")
    box = model.output_box(shape[0])
    cut = box.slices_in(Box.whole((shape[0], 3, *shape[2:])))
    x = torch.randn(shape)[model.input_box(shape[0]).slices_in(Box.whole(shape))].clone()
    y = torch.randint(0, 3, (shape[0], *shape[2:]))[cut[:1] + cut[2:]].clone()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS") - sum(p.numel() * 4 for p in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(x, batch=shape[0])
        torch.nn.functional.cross_entropy(output, y, reduction="sum").backward()
        del output
        optimizer.step()
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    shape = (arguments.batch, 1, *(arguments.size,) * 3)
    graph = capture(zoo.build("unet3d"), torch.zeros(shape))
    cluster = Cluster.load("local").with_workers(arguments.workers)
    costs = Costs(graph, cluster, training=TRAINING)
    sample = Plan.uniform(graph, arguments.workers, n=min(arguments.batch, arguments.workers))
    need = predict(sample, costs).memory
    cap = int(arguments.share * need)
    capped, _ = Planner(costs).under(cap)
    print(f"sample parallelism needs {size(need)} a worker; the cap is {size(cap)}")
    figures: dict[str, object] = {"cap": cap}
    for label, plan in (("sample", sample), ("capped", capped)):
        found = run_local(peak, arguments.workers, plan, shape)
        step = simulate(plan, graph, cluster, training=TRAINING).seconds
        print(
            f"{label}: predicted {size(predict(plan, costs).memory)}, measured "
            f"{', '.join(map(size, found))}; step {step:.2f} s (roofline)"
        )
        figures[label] = {"predicted": predict(plan, costs).memory, "measured": found}
    print(f"splits under the cap: {', '.join(sorted({str(c) for c in capped.layers.values()}))}")
    print("under the cap" if max(found) <= cap else "OVER THE CAP")
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
