"""What checkpoints cost: rounds of training steps without a save, with one, and waiting for it.

    python benchmarks/checkpoint.py [--model resnet34_cifar] [--workers 2] [--every 5] [--rounds 9]

Prints, for rounds that are interleaved in one run: the seconds of `save` itself (the copy), of a
round with a save in the background, and of one that waits for the save, against a round without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from results import save
from shardwise import Plan, capture, parallelize, run_local, zoo
from shardwise.checkpoint import Checkpoints

KINDS = ("none", "background", "waiting")


def measure(name: str, folder: str, every: int, rounds: int, batch: int) -> dict[str, list[float]]:
    """Seconds of every round, by kind, and of `save`; on every rank."""
    torch.manual_seed(0)
    plain, x = zoo.build(name), torch.randn(zoo.input_shape(name, batch))
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    model = parallelize(plain, Plan.uniform(capture(plain, x), n=world))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    checkpoints = Checkpoints(folder)
    y = torch.zeros(batch, dtype=torch.long)
    times: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "save")}
    for index in range((rounds + 1) * len(KINDS)):
        kind = KINDS[index % len(KINDS)]
        start = time.perf_counter()
        if kind != "none":
            checkpoints.save(index, model, optimizer, {})
            saved = time.perf_counter() - start
        if kind == "waiting":
            checkpoints.wait()
        for _ in range(every):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        seconds = time.perf_counter() - start
        checkpoints.wait()
        if index >= len(KINDS):  # the first round of each kind does not count
            times[kind].append(seconds)
            if kind == "background":
                times["save"].append(saved)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and ratios to the rounds without a save, with quartiles."""
    found: dict[str, Any] = {f"{k} seconds": statistics.median(v) for k, v in times.items()}
    for kind in KINDS[1:]:
        ratios = [b / a for a, b in zip(times["none"], times[kind], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        found[f"{kind} ratio"] = statistics.median(ratios)
        found[f"{kind} ratio 25 %"], found[f"{kind} ratio 75 %"] = quartiles[0], quartiles[2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet34_cifar")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=5, help="steps per save")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        options = (arguments.model, folder, arguments.every, arguments.rounds, arguments.batch)
        times = run_local(measure, arguments.workers, *options)[0]
        last = max(Path(folder).iterdir())
        megabytes = sum(path.stat().st_size for path in last.iterdir()) / 2**20
    row = {"model": arguments.model, "MiB": megabytes, **summary(times)}
    for name, value in row.items():
        print(f"{name:22} {value:.4f}" if isinstance(value, float) else f"{name:22} {value}")
    save(arguments.json, row)


if __name__ == "__main__":
    main()
