"""The tuned sum against the backend's own call, by size: what `allreduce.py` shows of it."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import Communicator, SumRules
from shardwise.launch.launchers import launched_switches
from shardwise.measure.racing import lane_of, measure_sums, race_functions

HOSTS = (2, 4, 8)
SIZES = tuple(
    4096 << shift for shift in range(15)
)  # bytes: 4 KiB to 64 MiB; tuned at every other one
LEAST = 0.97  # of the backend's own speed; less is a loss, where the spread does not explain it


def runs_of(nbytes: int, quick: bool) -> int:
    """Pairs of sums: of large ones few, as they take seconds and vary little."""
    return (8 if nbytes <= 1 << 22 else 4) if quick else 25 if nbytes <= 1 << 22 else 9


def measure(sizes: list[int], runs: list[int]) -> dict[str, Any]:
    """Seconds of both at every size, after the tuning that `shardwise probe --sums` does."""
    comm = Communicator()
    switches, everybody = launched_switches(comm.size), tuple(range(comm.size))
    winners = measure_sums(comm, switches, races=[(everybody,)])
    lane = lane_of(comm, switches, [(everybody,)])
    lane.sums = SumRules(switches, winners)
    group, rows = dist.new_group(list(everybody)), []
    for nbytes, count in zip(sizes, runs, strict=True):
        x = torch.zeros(nbytes // 4)
        both = {
            "own": lambda x=x: dist.all_reduce(x, group=group),
            "tuned": lambda x=x: lane.all_reduce(everybody, x).wait(),
        }
        times = race_functions(lane, both, nbytes, count)
        chosen = lane.sums.algorithm(everybody, nbytes)
        rows.append({"bytes": nbytes, "seconds": times, "winner": chosen})
    return {"against_own": rows}


def ratio(row: dict[str, Any]) -> tuple[float, float]:
    """The median over pairs of how many times as fast as the backend's own; with its spread.

    The spread is half the range between the quartiles of the pairs.
    """
    both = row["seconds"]
    pairs = [own / tuned for own, tuned in zip(both["own"], both["tuned"], strict=True)]
    first, middle, third = statistics.quantiles(pairs, n=4, method="inclusive")
    return middle, (third - first) / 2


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['hosts']} hosts on two switches, links and uplinks of {found['link']}")
    print(f"{'':<9}{'gloo, ms':>12}{'tuned, ms':>12}   chosen        speed of gloo's own (spread)")
    for row in found["against_own"]:
        own, tuned = (1e3 * statistics.median(row["seconds"][way]) for way in ("own", "tuned"))
        middle, spread = ratio(row)
        print(
            f"{row['bytes'] >> 10:>5} KiB{own:>12.2f}{tuned:>12.2f}   {row['winner']:<12}"
            f"{middle:>8.2f} (±{spread:.2f})"
        )


def verdict(against: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether the tuned sum is nowhere slower than the spread explains."""
    rows = [(found["hosts"], row, *ratio(row)) for found in against for row in found["against_own"]]
    slow = [row for row in rows if row[2] < LEAST]
    lost = [row for row in slow if row[2] + row[3] < LEAST]
    hosts, row, middle, spread = min(rows, key=lambda row: row[2])
    return not lost, (
        f"of {len(rows)} sizes and numbers of hosts, tuned is below {LEAST} of gloo's own speed at "
        f"{len(slow)}, by more than the spread at {len(lost)}; the least is {middle:.2f} "
        f"(±{spread:.2f}), {row['bytes'] >> 10} KiB on {hosts} hosts"
    )
