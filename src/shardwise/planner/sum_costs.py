"""What sums take: over one set of segments, many at once, and turn by turn of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy as np

from shardwise.cluster.measured_sums import Measured, Schedule, seconds_of
from shardwise.cluster.schedules import ALGORITHMS, Switches


@dataclass(frozen=True)
class SumModel:
    """What a sum over some segments takes: (latency, time per byte of a block)."""

    sums: tuple[tuple[float, float], ...] = ()  # one per algorithm
    scatter: tuple[float, float] = (0.0, 0.0)
    copies: float = 0.0  # bytes moved per byte of a block: each rank sends its block nearly twice
    measured: tuple[Measured, ...] = ()  # one per kind of segment, where sums were measured

    def seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """What was measured, of the slowest kind of segment, else the best algorithm's time."""
        if self.measured:
            return np.max([seconds_of(table, nbytes) for table in self.measured], axis=0)
        times = [fixed + per_byte * nbytes for fixed, per_byte in self.sums]
        return np.min(times, axis=0) if times else np.zeros(nbytes.shape)

    def scatter_seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """The ranks of every segment exchange equal parts of a block.

        A reduce-scatter of partial results, or the all-gather that undoes it.
        """
        fixed, per_byte = self.scatter
        return fixed + per_byte * nbytes

    def bytes(self, nbytes: np.ndarray) -> np.ndarray:
        """The bytes that a sum moves in all."""
        return self.copies * nbytes


@dataclass(frozen=True, eq=False)
class SumCosts:
    """Sums or exchanges inside segments, for many configs at once."""

    known: Sequence[SumModel]
    places: np.ndarray  # of the configs among those of a layer
    models: np.ndarray  # of each config's segments, numbers of known ones
    nbytes: np.ndarray  # of a block
    users: np.ndarray  # the same number where the same ranks have blocks

    @classmethod
    def none(cls) -> SumCosts:
        empty = np.zeros(0, dtype=np.int64)
        return cls((), empty, empty, np.zeros(0), empty)

    def where(self, mask: np.ndarray) -> SumCosts:
        arrays = (self.places, self.models, self.nbytes, self.users)
        return SumCosts(self.known, *(array[mask] for array in arrays))

    def each(self, cost: Callable[[SumModel, np.ndarray], np.ndarray]) -> np.ndarray:
        """What each sum costs, e.g. `SumModel.seconds`."""
        found = np.zeros(len(self.nbytes))
        for number in np.unique(self.models):
            mask = self.models == number
            found[mask] = cost(self.known[number], self.nbytes[mask])
        return found


# -- ranks that sum together, all groups of one sum at once ----------------------------------------

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


@lru_cache(maxsize=256)
def _turns(schedule: Schedule, switches: Switches, size: int) -> tuple[list[np.ndarray], list[int]]:
    """Who sends how many parts to whom in a group of so many ranks, and which turn comes when.

    A turn is int64 [messages, 3], with the places of sender and receiver. Most of a ring differ
    only in which part it is that is sent.
    """
    turns: list[np.ndarray] = []
    order: list[int] = []
    for turn in ALGORITHMS[schedule](switches, (0, size)):
        pairs = np.column_stack([turn[:, :2], turn[:, 3] - turn[:, 2]])
        if not turns or not np.array_equal(pairs, turns[-1]):
            turns.append(pairs)
        order.append(len(turns) - 1)
    return turns, order


def walked(
    schedule: Schedule, kinds: dict[Switches, np.ndarray], carried: Carried
) -> tuple[float, float]:
    """The latency of an all-reduce, and its time per byte of a block.

    Turn by turn the busiest port counts. What a rank sends waits for what it received before, so
    latencies add up along the longest way. The way back is the mirror image and takes as long.
    """
    groups = [(*_turns(schedule, s, ranks.shape[1]), ranks) for s, ranks in kinds.items()]
    now = np.zeros(1 + max(int(ranks.max()) for ranks in kinds.values()))
    known: dict[tuple[int | None, ...], tuple[np.ndarray, np.ndarray, np.ndarray, float]] = {}
    total = 0.0
    for turn in zip_longest(*(order for _, order, _ in groups)):
        if turn not in known:
            messages = [
                _messages(turns[place], ranks)
                for (turns, _, ranks), place in zip(groups, turn, strict=True)
                if place is not None
            ]
            senders, receivers, sizes = map(np.concatenate, zip(*messages, strict=True))
            known[turn] = senders, receivers, *carried(senders, receivers, sizes)
        senders, receivers, latencies, seconds = known[turn]
        np.maximum.at(now, receivers, now[senders] + latencies)
        total += seconds
    return 2.0 * float(now.max()), 2.0 * total


def _messages(turn: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, ...]:
    """The messages of one turn in all segments of a kind: senders, receivers, parts of a block."""
    senders, receivers, sizes = turn.T
    parts = np.tile(sizes / ranks.shape[1], len(ranks))
    return ranks[:, senders].ravel(), ranks[:, receivers].ravel(), parts
