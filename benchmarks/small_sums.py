"""Small sums that everybody waits for, such as a norm's statistics: our connections against gloo.

    python benchmarks/small_sums.py [--workers 4] [--bytes 4096] [--rounds 20]

Local workers, which share the cores of this machine, sum a vector over our own connections, by
gloo's messages (which carried it before, and still do where ports are closed) and by gloo's own
all-reduce. Rounds of 50 sums take turns; prints the median microseconds of a sum with quartiles,
and of the time on a core that it takes each worker.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from results import save
from shardwise import run_local
from shardwise.comm import About, Communicator

SUMS = 50  # of a round
WAYS: dict[str, dict[str, Any]] = {  # what is about gradients goes over gloo
    "our connections": {},
    "gloo's messages": {"about": About("a tensor", "gradients"), "algorithm": "direct"},
    "gloo's all-reduce": {"algorithm": "backend"},
}


def measure(nbytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a sum on this rank, and those of a core, in each round."""
    torch.set_num_threads(1)
    comm, x = Communicator(), torch.zeros(nbytes // 8, dtype=torch.float64)
    everybody = tuple(range(comm.size))
    comm.prepare([everybody])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            comm.gather_objects(None)
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(SUMS):
                comm.all_reduce(everybody, x, **way).wait()
            taken = (time.perf_counter() - start) / SUMS, (time.process_time() - busy) / SUMS
            if number:
                found[name].append(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    own = run_local(measure, arguments.workers, arguments.bytes, arguments.rounds)[0]
    rows = []
    print(f"{arguments.workers} workers, {arguments.bytes} bytes")
    print(f"{'':<20}{'us a sum':>10}{'quartiles':>16}{'us of a core':>15}")
    for name, taken in own.items():
        low, median, high = (1e6 * s for s in statistics.quantiles([t for t, _ in taken], n=4))
        busy = 1e6 * statistics.median(b for _, b in taken)
        print(f"{name:<20}{median:>10.0f}{f'{low:.0f} to {high:.0f}':>16}{busy:>15.0f}")
        rows.append({"way": name, "microseconds": median, "quartiles": [low, high], "core": busy})
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
