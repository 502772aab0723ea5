"""Measuring sums: every algorithm by group and size, and what a message costs (P5's figures)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from shardwise.cluster.measured_sums import Algorithm, Winner
from shardwise.cluster.schedules import ALGORITHMS, Message, Round
from shardwise.comm import Communicator, SumRules

LANE = "sums"
# Bytes: 4 KiB to 16 MiB. Every fourth size: with every sixteenth, the winner of 64 KiB took 1.9
# times as long as gloo's own at 256 KiB on 4 hosts.
SIZES = tuple(4096 << shift for shift in range(0, 13, 2))
DIRECT = 256 << 10  # bytes of the largest vector that is sent whole to everybody
MARGIN = 1.05  # how much faster than the backend's own a winner must be, to be no accident
PROBES = 5  # of each message
MESSAGE, NUDGE = 2 << 20, 1 << 10  # bytes of a message whose rate, whose latency counts
IN_A_ROW = {1 << 15: 48, 1 << 17: 24, 1 << 20: 12}  # messages up to a size: ranks start apart

Segments = tuple[tuple[int, ...], ...]  # disjoint groups of ranks that sum at the same time
Way = Algorithm | None  # None: what the communicator chooses itself
Key = TypeVar("Key", bound=Hashable)


def lane_of(
    comm: Communicator, switches: tuple[int, ...], races: Iterable[Segments]
) -> Communicator:
    """A lane for schedules, with the process groups of these segments."""
    lane = comm.in_lane(LANE)
    lane.sums = SumRules(switches)
    lane.prepare(ranks for segments in races for ranks in segments)
    return lane


# -- the winners -----------------------------------------------------------------------------------


def races_of(switches: tuple[int, ...]) -> list[Segments]:
    """All ranks as one group, and equal segments of each size: neighbours, and far apart.

    One for each number of ranks and of switches that a group spans.
    """
    world, found = len(switches), {}
    for size in (n for n in range(world, 1, -1) if world % n == 0):
        count = world // size
        near = tuple(tuple(range(first, first + size)) for first in range(0, world, size))
        far = tuple(tuple(range(first, world, count)) for first in range(count))
        for segments in (near, far):
            spans = {len({switches[rank] for rank in ranks}) for ranks in segments}
            if len(spans) == 1:
                found.setdefault((size, *spans), segments)
    return list(found.values())


def ways(nbytes: int) -> list[Algorithm]:
    """The algorithms that may be the fastest at a size; the backend's own is always one."""
    direct: list[Algorithm] = ["direct"] if nbytes <= DIRECT else []
    return ["backend", *direct, *ALGORITHMS]


def runs_of(nbytes: int) -> int:
    """Small sums vary more, and take less time."""
    return 15 if nbytes <= 1 << 17 else 7 if nbytes <= 1 << 21 else 3


def in_a_row(nbytes: int) -> int:
    """Ranks start some milliseconds apart: of small sums, several are timed together."""
    return 8 if nbytes <= 1 << 17 else 4 if nbytes <= 1 << 21 else 1


def measure_sums(
    comm: Communicator,
    switches: tuple[int, ...],
    sizes: Sequence[int] = SIZES,
    races: Sequence[Segments] | None = None,
    runs: Callable[[int], int] = runs_of,
) -> tuple[Winner, ...]:
    """The winners of all races; all ranks take part, and all find the same."""
    races, winners = races_of(switches) if races is None else races, []
    lane = lane_of(comm, switches, races)
    for segments in races:
        num_switches = len(lane.sums.of(segments[0])) if lane.sums else 1
        for nbytes in sizes:
            times = race(lane, segments, nbytes, ways(nbytes), runs(nbytes))
            best, seconds = _best(times)
            winners.append(
                Winner(
                    ranks=len(segments[0]),
                    switches=num_switches,
                    bytes=nbytes,
                    algorithm=best,
                    seconds=seconds,
                )
            )
    return tuple(winners)


def _best(times: dict[Way, list[float]]) -> tuple[Algorithm, float]:
    """The least median; the backend's own unless another is clearly faster."""
    medians: dict[Algorithm, float] = {
        way: statistics.median(seconds) for way, seconds in times.items() if way is not None
    }
    best = min(medians, key=lambda way: medians[way] * (1.0 if way == "backend" else MARGIN))
    return best, medians[best]


def race(
    lane: Communicator, segments: Segments, nbytes: int, ways: Sequence[Way], runs: int
) -> dict[Way, list[float]]:
    """Seconds of every way to sum, in turn; see `race_functions`."""
    (own,) = (ranks for ranks in segments if lane.rank in ranks)
    x = torch.zeros(max(nbytes // 4, 1))

    def sum_once(way: Way) -> None:
        lane.all_reduce(own, x, algorithm=way).wait()

    return race_functions(lane, {way: partial(sum_once, way) for way in ways}, nbytes, runs)


def race_functions(
    lane: Communicator, functions: Mapping[Key, Callable[[], None]], nbytes: int, runs: int
) -> dict[Key, list[float]]:
    """Seconds of each, in turn, so that what else happens here hits all alike.

    Another one begins in every run: what comes first, or after a certain other one, may take
    longer. A run takes as long as its slowest rank. One more comes first, to warm up; sums that are
    worth no more than two runs take so long that it does not matter.
    """
    order, warm_up = list(functions), 1 if runs > 2 else 0
    times: dict[Key, list[float]] = {key: [] for key in order}
    for _ in range(runs + warm_up):
        for key in order:
            times[key].append(_timed(lane, functions[key], in_a_row(nbytes)))
        order = [*order[1:], *order[:1]]
    every = lane.gather_objects(times)
    return {
        key: [max(run) for run in zip(*(own[key] for own in every), strict=True)][warm_up:]
        for key in functions
    }


def _timed(lane: Communicator, function: Callable[[], None], count: int = 1) -> float:
    """Seconds of a function, the mean over some runs in a row, from when all ranks are there."""
    everybody = tuple(range(lane.size))
    lane.all_reduce(everybody, torch.zeros(len(everybody)), algorithm="halving").wait()
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count


# -- the figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What messages cost when all ranks send one: P5's alpha, beta1, beta2 and gamma."""

    latency: float  # seconds per message
    inside: float  # seconds per byte at a switch
    across: float  # seconds per byte, when all ranks of a switch send to another
    adding: float  # seconds per byte that is added, beyond its arrival


def measure_figures(comm: Communicator, switches: tuple[int, ...]) -> Figures:
    """Times of single rounds, in which every rank sends to one and receives from one."""
    lane = lane_of(comm, switches, [(tuple(range(comm.size)),)])
    probed = [probe_messages(lane, switches, MESSAGE) for _ in range(PROBES + 1)]
    return figures_of(lane, probed[1:], MESSAGE)


def probe_messages(lane: Communicator, switches: tuple[int, ...], nbytes: int) -> list[float]:
    """Seconds of a round on this rank: small, large, large and added, and large to far ranks."""
    near, far = _neighbours(switches, lane.rank)
    probes = ((near, NUDGE, False), (near, nbytes, False), (near, nbytes, True))
    return [_round_seconds(lane, *probe) for probe in (*probes, (far, nbytes, False))]


def figures_of(lane: Communicator, probed: list[list[float]], nbytes: int) -> Figures:
    """What probes of all ranks say; a round takes as long as its slowest rank."""
    slowest = np.array(lane.gather_objects(probed)).max(axis=0)
    nudge, inside, adding, across = (float(seconds) for seconds in np.median(slowest, axis=0))
    return Figures(
        nudge,
        max(inside - nudge, 1e-12) / nbytes,
        max(across - nudge, 1e-12) / nbytes,
        max(adding - inside, 0.0) / nbytes,
    )


def _neighbours(switches: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Whom a rank sends to and receives from, at its own switch and at others."""
    members: dict[int, list[int]] = {}
    for other, switch in enumerate(switches):
        members.setdefault(switch, []).append(other)
    rows = list(members.values())
    (row,) = (place for place, ranks in enumerate(rows) if rank in ranks)
    own, column = rows[row], rows[row].index(rank)
    near = own[(column + 1) % len(own)], own[column - 1]
    if len({len(ranks) for ranks in rows}) > 1 or len(rows) == 1:
        return near, near
    return near, (rows[(row + 1) % len(rows)][column], rows[row - 1][column])


def _round_seconds(lane: Communicator, peers: tuple[int, int], nbytes: int, adds: bool) -> float:
    """What one round brings is sent in the next, as in a sum: each waits for the one before."""
    numel, (ahead, behind) = nbytes // 4, peers
    count = next((rounds for most, rounds in IN_A_ROW.items() if nbytes <= most), 8)
    x = torch.zeros((count + 1) * numel)
    rounds = tuple(
        Round(
            (Message(ahead, turn * numel, (turn + 1) * numel),),
            (Message(behind, (turn + 1) * numel, (turn + 2) * numel),),
            adds,
        )
        for turn in range(count)
    )
    everybody = tuple(range(lane.size))

    def run() -> None:
        if ahead != lane.rank:
            lane.carry_out(rounds, everybody, x).wait()

    return _timed(lane, run) / count
