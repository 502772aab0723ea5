"""Ranks that sum together, for all groups of one sum at once, and what their schedule takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy as np

from shardwise.cluster.measured_sums import Schedule
from shardwise.cluster.schedules import ALGORITHMS, Switches
from shardwise.geometry.layout import first_holders

# From senders, receivers and sizes of messages to the latency of each, and the time of the bytes.
Carried = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, float]]


@dataclass(frozen=True, eq=False)
class Ring:
    """The ranks of all segments of several ranks, segment by segment, in rank order."""

    ranks: np.ndarray
    segments: np.ndarray
    sizes: np.ndarray  # of the segment of each rank

    @classmethod
    def of(cls, segments: np.ndarray) -> Ring | None:
        used = np.flatnonzero(segments >= 0)
        _, place, counts = np.unique(segments[used], return_inverse=True, return_counts=True)
        order = np.argsort(place, kind="stable")
        ranks, sizes = used[order], counts[place[order]]
        several = sizes > 1
        found = cls(ranks[several], segments[ranks[several]], sizes[several])
        return found if several.any() else None

    @cached_property
    def size(self) -> int:
        return int(self.sizes.max())

    def kinds(self, levels: Sequence[np.ndarray]) -> dict[Switches, np.ndarray]:
        """The ranks of segments that are spread alike over units, [segments, ranks].

        `levels` has the unit of each rank, outermost level first. A segment's ranks are numbered.
        """
        found: dict[Switches, list[np.ndarray]] = {}
        for ranks in np.split(self.ranks, np.flatnonzero(np.diff(self.segments)) + 1):
            units = [level[ranks].tolist() for level in levels]
            found.setdefault(_spread(range(len(ranks)), units), []).append(ranks)
        return {spread: np.stack(segments) for spread, segments in found.items()}


def _spread(places: Iterable[int], levels: Sequence[Sequence[int]]) -> Switches:
    """The places of ranks, by unit and by unit inside these."""
    if not levels:
        return tuple(places)
    units: dict[int, list[int]] = {}
    for place in places:
        units.setdefault(levels[0][place], []).append(place)
    return tuple(_spread(members, levels[1:]) for members in units.values())


# -- schedules -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Traffic:
    """A reduce-scatter of one group: its different turns, and which comes when."""

    turns: list[np.ndarray]  # int64 [messages, 3]: the places of sender and receiver, parts
    order: list[int]
    parts: int  # of the block


@lru_cache(maxsize=256)
def _traffic(schedule: Schedule, switches: Switches, size: int) -> _Traffic:
    """Who sends how much to whom in a group of so many ranks.

    Most turns of a ring differ only in which part it is that is sent.
    """
    turns: list[np.ndarray] = []
    order: list[int] = []
    for turn in ALGORITHMS[schedule](switches, (0, size)):
        pairs = np.column_stack([turn[:, :2], turn[:, 3] - turn[:, 2]])
        if not turns or not np.array_equal(pairs, turns[-1]):
            turns.append(pairs)
        order.append(len(turns) - 1)
    return _Traffic(turns, order, size)


def walked(
    schedule: Schedule, kinds: dict[Switches, np.ndarray], carried: Carried
) -> tuple[float, float]:
    """The latency of an all-reduce, and its time per byte of a block.

    Turn by turn the busiest port counts. What a rank sends waits for what it received before, so
    latencies add up along the longest way. The way back is the mirror image and takes as long.
    """
    groups = [
        (_traffic(schedule, spread, ranks.shape[1]), ranks) for spread, ranks in kinds.items()
    ]
    now = np.zeros(1 + max(int(ranks.max()) for ranks in kinds.values()))
    known: dict[tuple[int | None, ...], tuple[np.ndarray, np.ndarray, np.ndarray, float]] = {}
    total = 0.0
    for turn in zip_longest(*(traffic.order for traffic, _ in groups)):
        if turn not in known:
            messages = [
                _messages(traffic, ranks, place)
                for (traffic, ranks), place in zip(groups, turn, strict=True)
                if place is not None
            ]
            senders, receivers, sizes = map(np.concatenate, zip(*messages, strict=True))
            known[turn] = senders, receivers, *carried(senders, receivers, sizes)
        senders, receivers, latencies, seconds = known[turn]
        np.maximum.at(now, receivers, now[senders] + latencies)
        total += seconds
    return 2.0 * float(now.max()), 2.0 * total


def _messages(traffic: _Traffic, ranks: np.ndarray, place: int) -> tuple[np.ndarray, ...]:
    """The messages of one turn in all segments of a kind: senders, receivers, parts of a block."""
    senders, receivers, sizes = traffic.turns[place].T
    parts = np.tile(sizes / traffic.parts, len(ranks))
    return ranks[:, senders].ravel(), ranks[:, receivers].ravel(), parts


def segments_of(bounds: np.ndarray) -> np.ndarray:
    """Which ranks hold the same, in many layouts; [layouts, world, ndim, 2] to [layouts, world]."""
    return np.stack([first_holders(each) for each in bounds])
