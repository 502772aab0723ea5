"""One worker against plain PyTorch, interleaved in one run.

    python benchmarks/overhead.py [--rounds 15] [--batch 8] [--size 112]

Prints the ratio of medians (shardwise / plain): for ResNet-34 and VGG-16 of forward and backward,
where the aim is at most 1.02; for ResNet-50 of one image of 224 x 224 under torch.inference_mode,
in five times as many rounds, where it is 1.03.
Where other programs take turns with this one, the ratio of processor time says more than that of
the clock; OMP_NUM_THREADS=1 keeps threads that wait from counting.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from results import save
from shardwise import Plan, capture, parallelize, zoo


def train(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()


@torch.inference_mode()
def infer(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


def seconds_per_step(step: Callable[[], None]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    start = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(name: str, batch: int, size: int, rounds: int, trains: bool) -> dict[str, float | str]:
    torch.manual_seed(0)
    plain, x = zoo.build(name).train(trains), torch.randn(batch, 3, size, size)
    plan = Plan.uniform(capture(plain, x, training=trains))
    models = {"plain": plain, "shardwise": parallelize(copy.deepcopy(plain), plan).train(trains)}
    step = train if trains else infer
    times: dict[str, list[float]] = {key: [] for key in models}
    busy: dict[str, list[float]] = {key: [] for key in models}
    for index in range(rounds + 2):
        order = list(models) if index % 2 else list(reversed(models))
        for key in order:
            elapsed, processor = seconds_per_step(lambda key=key: step(models[key], x))
            if index >= 2:  # warm-up
                times[key].append(elapsed)
                busy[key].append(processor)
    medians = {key: statistics.median(values) for key, values in times.items()}
    pairs = [b / a for a, b in zip(times["plain"], times["shardwise"], strict=True)]
    quartiles = statistics.quantiles(pairs, n=4)
    processor = {key: statistics.median(values) for key, values in busy.items()}
    return {
        "network": name if trains else f"{name} inference",
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
    given = (arguments.batch, arguments.size, arguments.rounds, True)
    cases = {"resnet34": given, "vgg16": given, "resnet50": (1, 224, 5 * arguments.rounds, False)}
    for name, case in cases.items():
        row = measure(name, *case)
        rows.append(row)
        print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else str(v) for k, v in row.items()))
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
