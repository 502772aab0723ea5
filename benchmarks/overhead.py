"""One worker against plain PyTorch: forward and backward, interleaved in one run.

    python benchmarks/overhead.py [--rounds 15] [--batch 8] [--size 112]

Prints the ratio of medians (shardwise / plain) for ResNet-34 and VGG-16; the aim is at most 1.02.
Where other programs take turns with this one, the ratio of processor time says more than that of
the clock; OMP_NUM_THREADS=1 keeps threads that wait from counting.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from results import save
from shardwise import Plan, capture, parallelize, zoo


def seconds_per_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """By the clock, and of the processor."""
    start = time.perf_counter(), time.process_time()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    elapsed = time.perf_counter() - start[0], time.process_time() - start[1]
    model.zero_grad(set_to_none=True)
    return elapsed


def measure(name: str, batch: int, size: int, rounds: int) -> dict[str, float | str]:
    torch.manual_seed(0)
    plain = zoo.build(name)
    x, y = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    plan = Plan.uniform(capture(plain, x))
    models = {"plain": plain, "shardwise": parallelize(copy.deepcopy(plain), plan)}
    times: dict[str, list[float]] = {key: [] for key in models}
    busy: dict[str, list[float]] = {key: [] for key in models}
    for index in range(rounds + 2):
        order = list(models) if index % 2 else list(reversed(models))
        for key in order:
            elapsed, processor = seconds_per_step(models[key], x, y)
            if index >= 2:  # warm-up
                times[key].append(elapsed)
                busy[key].append(processor)
    medians = {key: statistics.median(values) for key, values in times.items()}
    pairs = [b / a for a, b in zip(times["plain"], times["shardwise"], strict=True)]
    quartiles = statistics.quantiles(pairs, n=4)
    processor = {key: statistics.median(values) for key, values in busy.items()}
    return {
        "network": name,
        "plain seconds": medians["plain"],
        "shardwise seconds": medians["shardwise"],
        "ratio": medians["shardwise"] / medians["plain"],
        "ratio 25 %": quartiles[0],
        "ratio 75 %": quartiles[2],
        "processor ratio": processor["shardwise"] / processor["plain"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = []
    for name in ("resnet34", "vgg16"):
        row = measure(name, arguments.batch, arguments.size, arguments.rounds)
        rows.append(row)
        print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else str(v) for k, v in row.items()))
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
