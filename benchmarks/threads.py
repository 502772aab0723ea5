"""Whether our threads and torch's get in each other's way: operators in turns against each alone.

    python benchmarks/threads.py [--threads 2] [--rounds 200]
    SHARDWISE_THREADS=own python benchmarks/threads.py    # a pool of our own beside torch's

Prints microseconds of an operator of torch (a ReLU) and of a convolution of ours, alone and in
turns. Threads that spin while others work would make the turns longer than both together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from results import save
from shardwise.kernels import dispatch, library


def median_seconds(calls: list[Callable[[], object]], rounds: int) -> float:
    """Of making all calls, one after the other."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    x, w = torch.randn(8, 64, 28, 28), torch.randn(64, 64, 3, 3)
    settings = ((1, 1), (1, 1), (1, 1), 1)

    def stock() -> object:
        return torch.relu(x)

    def ours() -> object:
        return dispatch.forward(x, w, None, settings, "convgemm")

    assert library() is not None, "no native kernels here"
    sets = {"torch": [stock], "ours": [ours], "in turns": [stock, ours]}
    taken = {name: [] for name in sets}
    for _ in range(5):  # in turns themselves: a machine's speed drifts
        for name, calls in sets.items():
            taken[name].append(median_seconds(calls, given.rounds))
    best = {name: min(times) * 1e6 for name, times in taken.items()}
    together = best["torch"] + best["ours"]
    pool = os.environ.get("SHARDWISE_THREADS", "torch's")
    print(f"{given.threads} threads, pool: {pool}")
    print("  ".join(f"{name} {us:.0f} us" for name, us in best.items()))
    print(f"in turns / sum of both alone: {best['in turns'] / together:.3f}")
    save(given.json, {"pool": pool, "threads": given.threads, "microseconds": best})


if __name__ == "__main__":
    main()
