"""Peak memory of a training step of the 3-D U-Net: one device against a spatial split.

    python benchmarks/memory.py [--workers 4] [--size 64] [--split h=2,w=2]

Prints what a step adds to the memory of each rank (peak resident set minus the resident set before
the first step, weights included in neither), and its share of what it adds on one device. The aim
is at most 35 % on four workers.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

import torch

from results import save
from shardwise import Plan, capture, parallelize, zoo
from shardwise.geometry.box import Box
from shardwise.geometry.split_text import parse_split
from shardwise.launch.workers import run_local

MIB = 1 << 20


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def reset_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def step_memory(size: int, split: dict[str, int]) -> int:
    """Bytes that training steps add on this rank; an empty split is the plain model."""
    torch.manual_seed(0)
    model = zoo.build("unet3d")
    x = torch.randn(1, 1, size, size, size)
    y = torch.randint(0, 3, (1, size, size, size))
    if split:
        model = parallelize(model, Plan.uniform(capture(model, x), **split), output="local")
        box = model.output_box(1)
        y = y[(slice(None), *box.slices_in(Box.whole((1, 3, size, size, size)))[2:])]
    for _ in range(2):  # the first step also allocates gradients
        reset_peak()
        before = resident("VmRSS")
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        added = resident("VmHWM") - before
        del loss
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--split", default="h=2,w=2")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    # Large tensors go back to the system when they are freed, so that the peak is theirs.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    split = parse_split(arguments.split)
    world = 1
    for degree in split.values():
        world *= degree
    (whole,) = run_local(step_memory, 2, arguments.size, {})[:1]
    parts = run_local(step_memory, world, arguments.size, split)
    print(f"one device: {whole / MIB:.0f} MiB")
    for rank, part in enumerate(parts):
        print(
            f"rank {rank} of {world} ({arguments.split}): {part / MIB:.0f} MiB, {part / whole:.1%}"
        )
    print(f"largest share: {max(parts) / whole:.1%} (aim: at most 35 % on 4 workers)")
    save(arguments.json, {"one device": whole, "ranks": parts})


if __name__ == "__main__":
    main()
