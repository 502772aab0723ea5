"""How long traffic takes on the links of a cluster.

A *port* joins a unit (a worker, a host, a switch) to its level's medium. What a transfer or a sum
puts on every port, at every level, decides its time: the busiest port, plus the messages' latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from shardwise.cluster.cluster import Cluster, Link
from shardwise.cluster.measured_sums import Measured, measured, seconds_of
from shardwise.planner.rings import Ring

ALGORITHMS = 4  # the most that are compared for one sum


@dataclass(frozen=True, eq=False)
class Level:
    """One level of links: which unit every rank lies in, and which units share a medium."""

    link: Link
    units: np.ndarray  # int64 [world], ascending
    groups: np.ndarray  # int64 [world], ascending

    @cached_property
    def starts(self) -> np.ndarray:
        """The first rank of every unit."""
        return np.flatnonzero(np.diff(self.units, prepend=-1))

    @cached_property
    def group_starts(self) -> np.ndarray:
        """The first unit of every group."""
        return np.flatnonzero(np.diff(self.groups[self.starts], prepend=-1))

    def per_unit(self, amounts: np.ndarray) -> np.ndarray:
        """Sums over the ranks of every unit; [..., world] to [..., units]."""
        if len(self.starts) == amounts.shape[-1]:
            return amounts
        return np.add.reduceat(amounts, self.starts, axis=-1)

    def seconds(self, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        """The time of the busiest port; bytes per unit, [..., units] to [...]."""
        if self.link.shared:
            sent = np.add.reduceat(sent, self.group_starts, axis=-1)
            received = np.add.reduceat(received, self.group_starts, axis=-1)
        busiest = np.maximum(sent.max(axis=-1), received.max(axis=-1))
        return busiest / self.link.rate


class Ports:
    """The ports of one level, or some of them; the busiest decides how long a transfer takes."""

    def __init__(self, level: Level, picked: np.ndarray) -> None:
        self.ranks = np.flatnonzero(np.isin(level.units, level.units[level.starts[picked]]))
        self.level = Level(level.link, level.units[self.ranks], level.groups[self.ranks])
        self.edges = np.append(self.level.starts, len(self.ranks))
        self.unit = np.repeat(np.arange(len(picked)), np.diff(self.edges))

    def __len__(self) -> int:
        return len(self.level.starts)

    def seconds(self, kept: np.ndarray, sent: np.ndarray, needed: np.ndarray) -> np.ndarray:
        """The time per byte on the busiest port; what ports keep does not pass them.

        [ports, ...] to [...]
        """
        if self.level.link.shared:
            starts = self.level.group_starts
            sent, needed = (np.add.reduceat(x - kept, starts, axis=0) for x in (sent, needed))
            busiest = np.maximum(sent, needed)
        else:
            busiest = np.maximum(sent, needed)
            busiest -= kept
        return busiest.max(axis=0) / self.level.link.rate


def some_units(level: Level, count: int) -> np.ndarray:
    """About so many units of a level: first and last ones of blocks, and others in between.

    Where units share a medium, all units of some groups.
    """
    total = len(level.starts)
    if total <= count:
        return np.arange(total)
    if level.link.shared:
        group = np.repeat(np.arange(len(level.group_starts)), np.diff([*level.group_starts, total]))
        few = max(1, count * len(level.group_starts) // total)
        return np.flatnonzero(np.isin(group, np.linspace(0, group[-1], few).astype(int)))
    edges = np.linspace(0, total, count // 4 + 1).astype(int)
    within = (np.arange(len(edges) - 1) * 0.618034) % 1.0  # at another place in each block
    middle = edges[:-1] + (within * np.diff(edges)).astype(int)
    return np.unique(np.concatenate([edges[:-1], edges[1:] - 1, middle]))


@dataclass(frozen=True)
class _Model:
    """What a sum over some segments takes: (latency, time per byte of a block)."""

    sums: tuple[tuple[float, float], ...]  # one per algorithm
    scatter: tuple[float, float]
    copies: float  # bytes moved per byte of a block
    measured: tuple[Measured, ...] = ()  # one per kind of segment, where sums were measured

    def seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """What was measured, of the slowest kind of segment, else the best algorithm's time."""
        if self.measured:
            return np.max([seconds_of(table, nbytes) for table in self.measured], axis=0)
        times = [fixed + per_byte * nbytes for fixed, per_byte in self.sums]
        return np.min(times, axis=0) if times else np.zeros(nbytes.shape)

    @property
    def row(self) -> list[float]:
        """The same as one row of numbers; algorithms that do not apply take forever."""
        sums = [*self.sums, *[(inf, 0.0)] * (ALGORITHMS - len(self.sums))]
        if not self.sums:
            sums = [(0.0, 0.0)] * ALGORITHMS
        fixed, per_byte = zip(*sums, strict=True)
        return [*fixed, *per_byte, *self.scatter, self.copies]


@dataclass(frozen=True, eq=False)
class Network:
    """The links of a cluster between its workers, innermost level first."""

    cluster: Cluster

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        cluster = self.cluster
        levels = [
            Level(link, cluster.units(index), cluster.groups(index))
            for index, link in enumerate(cluster.links)
        ]
        return tuple(level for level in levels if len(level.starts) > 1) or (levels[0],)

    @property
    def world(self) -> int:
        return self.cluster.world

    # -- messages ------------------------------------------------------------------------------

    def message_seconds(self, matrix: np.ndarray) -> float:
        """The time of messages that all start together; bytes from rank r to rank q."""
        if not matrix.any():
            return 0.0
        seconds, latency = 0.0, 0.0
        rank_from, rank_to = np.nonzero(matrix)
        sizes = matrix[rank_from, rank_to].astype(float)
        for level in self.levels:
            crossing = level.units[rank_from] != level.units[rank_to]
            if not crossing.any():
                continue
            count = len(level.starts)
            sent = np.bincount(level.units[rank_from], sizes * crossing, minlength=count)
            received = np.bincount(level.units[rank_to], sizes * crossing, minlength=count)
            seconds = max(seconds, float(level.seconds(sent, received)))
            latency = level.link.latency
        messages = np.maximum(np.bincount(rank_from).max(), np.bincount(rank_to).max())
        return seconds + latency * float(messages)

    # -- sums ----------------------------------------------------------------------------------

    def sum_seconds(self, segments: np.ndarray, nbytes: float) -> float:
        """The time in which every segment sums a block of so many bytes, all segments at once.

        `segments` numbers the segment of each rank (-1: none). The best algorithm counts: the ring,
        recursive halving and doubling with near or far partners first (P5), or two levels of rings;
        where the cluster's winners were measured, their times count.
        """
        return float(self._models[self.model(segments)].seconds(np.asarray(nbytes, dtype=float)))

    def sum_bytes(self, segments: np.ndarray, nbytes: float) -> float:
        """The bytes that a sum moves in all: each rank sends its block nearly twice."""
        return self._models[self.model(segments)].copies * nbytes

    def scatter_seconds(self, segments: np.ndarray, nbytes: float) -> float:
        """The time in which the ranks of every segment exchange equal parts of so many bytes.

        A reduce-scatter of partial results, or the all-gather that undoes it.
        """
        fixed, per_byte = self._models[self.model(segments)].scatter
        return fixed + per_byte * nbytes

    def model(self, segments: np.ndarray) -> int:
        """The number of what sums over these segments cost, worked out once."""
        key = segments.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._models)
            self._models.append(self._model(segments))
            self.__dict__.pop("rows", None)
        return self._numbers[key]

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        return {}

    @cached_property
    def _models(self) -> list[_Model]:
        return []

    @cached_property
    def rows(self) -> np.ndarray:
        """Of each model, see `_Model.row`."""
        return np.array([model.row for model in self._models]).reshape(-1, 2 * ALGORITHMS + 3)

    def _model(self, segments: np.ndarray) -> _Model:
        ring = Ring.of(segments)
        if ring is None:
            return _Model((), (0.0, 0.0), 0.0)
        share = 1.0 if self._highest(ring).link.staged else 1.0 - 1.0 / ring.sizes
        copies = float((2.0 * share * np.ones(len(ring.ranks))).sum())
        tables = self._measured(ring)
        return _Model(tuple(self._algorithms(ring)), self._scatter(ring), copies, tables)

    def _measured(self, ring: Ring) -> tuple[Measured, ...]:
        """The winners' times for every kind of segment; none unless all kinds were measured."""
        if not (winners := self.cluster.sums):
            return ()
        switches = np.array(self.cluster.switches)[ring.ranks]
        pairs = np.unique(np.stack([ring.segments, switches]), axis=1)
        names, spans = np.unique(pairs[0], return_counts=True)
        size_of = dict(zip(ring.segments.tolist(), ring.sizes.tolist(), strict=True))
        kinds = {(size_of[name], span) for name, span in zip(names.tolist(), spans, strict=True)}
        tables = [measured(winners, size, int(span)) for size, span in sorted(kinds)]
        return tuple(tables) if all(tables) else ()

    def _scatter(self, ring: Ring) -> tuple[float, float]:
        if (level := self._highest(ring)).link.staged:
            amounts = level.per_unit(np.bincount(ring.ranks, minlength=self.world).astype(float))
            return level.link.latency, float(level.seconds(amounts, amounts))
        seconds, latency = 0.0, 0.0
        for level in self.levels:
            pairs = ring.segments * self.world + level.units[ring.ranks]
            _, place, counts = np.unique(pairs, return_inverse=True, return_counts=True)
            outside = 1.0 - counts[place] / ring.sizes
            if outside.any():
                count = len(level.starts)
                amounts = np.bincount(level.units[ring.ranks], outside, minlength=count)
                seconds = max(seconds, float(level.seconds(amounts, amounts)))
                latency = level.link.latency
        return latency * (ring.size - 1), seconds

    def _algorithms(self, ring: Ring) -> list[tuple[float, float]]:
        link = (level := self._highest(ring)).link
        if link.sum_bandwidth is not None:
            share = 2.0 * (ring.size - 1) / ring.size
            return [(link.sum_latency or 0.0, share / link.sum_bandwidth)]
        if link.staged:
            amounts = level.per_unit(np.bincount(ring.ranks, minlength=self.world).astype(float))
            crossing = float(level.seconds(amounts, amounts))
            added = 0.0 if link.adding is None else crossing * link.rate / link.adding
            return [(2.0 * link.latency, 2.0 * crossing + added)]
        known = {
            "ring": self._ring(ring),
            "round-robin": self._halving(ring, near_first=True),
            "halving": self._halving(ring, near_first=False),
            "two-level": self._two_levels(ring),
        }
        allowed = self.cluster.schedules or tuple(known)
        models = [known[name] for name in allowed if known[name] is not None]
        added = self._added(ring)
        return [(fixed, byte + added) for fixed, byte in models or [known["ring"]]]

    def _added(self, ring: Ring) -> float:
        """The time per byte of a block in which a rank adds the others' parts (P5's gamma)."""
        rate = self.cluster.device.adding
        return 0.0 if rate is None else (1.0 - 1.0 / ring.size) / rate

    def _highest(self, ring: Ring) -> Level:
        """The outermost level that any segment crosses."""
        for level in reversed(self.levels):
            if (level.units[ring.ranks] != level.units[ring.next]).any():
                return level
        return self.levels[0]

    def _step(self, ranks: np.ndarray, partners: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Every rank sends to one partner: the latency, and the time of the bytes."""
        seconds, latency = 0.0, 0.0
        for level in self.levels:
            crossing = level.units[ranks] != level.units[partners]
            if crossing.any():
                count = len(level.starts)
                sent = np.bincount(level.units[ranks], sizes * crossing, minlength=count)
                received = np.bincount(level.units[partners], sizes * crossing, minlength=count)
                seconds = max(seconds, float(level.seconds(sent, received)))
                latency = level.link.latency
        return np.array([latency, seconds])

    def _ring(self, ring: Ring) -> tuple[float, float]:
        _, seconds = self._step(ring.ranks, ring.next, 1.0 / ring.sizes)
        return self._rounds(ring), 2 * (ring.size - 1) * seconds

    def _rounds(self, ring: Ring) -> float:
        """The latency of nearly once around the slowest ring, and of the same way back.

        What a rank sends waits for what its neighbour sent before, so latencies add up along the
        ring: those of few hops between hosts, and of many inside. All hops but the shortest: the
        last rank to end is the one behind the longest way.
        """
        hops = np.zeros(len(ring.ranks))
        for level in self.levels:
            crossing = level.units[ring.ranks] != level.units[ring.next]
            hops[crossing] = level.link.latency
        starts = np.flatnonzero(ring.index == 0)
        ways = np.add.reduceat(hops, starts) - np.minimum.reduceat(hops, starts)
        return 2.0 * float(ways.max())

    def _halving(self, ring: Ring, near_first: bool) -> tuple[float, float] | None:
        if (ring.sizes != ring.size).any() or ring.size & (ring.size - 1):
            return None
        distances = [1 << k for k in range(ring.size.bit_length() - 1)]
        total, amount = np.zeros(2), np.full(len(ring.ranks), 0.5)
        for distance in distances if near_first else reversed(distances):
            partners = ring.ranks[ring.positions + (ring.index ^ distance) - ring.index]
            total += 2.0 * self._step(ring.ranks, partners, amount)
            amount = amount / 2.0
        return float(total[0]), float(total[1])

    def _two_levels(self, ring: Ring) -> tuple[float, float] | None:
        """Reduce-scatter inside the units of the top level, sums across, all-gather inside."""
        units = self._highest(ring).units[ring.ranks]
        inside, across = np.full((2, self.world), -1)
        inside[ring.ranks] = ring.segments * self.world + units
        inner = Ring.of(inside)
        if (
            inner is None
            or len(inner.ranks) != len(ring.ranks)
            or (inner.sizes != inner.size).any()
        ):
            return None
        segments = np.zeros(self.world, dtype=np.int64)
        segments[ring.ranks] = ring.segments
        across[inner.ranks] = segments[inner.ranks] * self.world + inner.index
        outer = Ring.of(across)
        if outer is None:
            return None
        latencies, seconds = zip(self._ring(inner), self._ring(outer), strict=True)
        return sum(latencies), seconds[0] + seconds[1] / inner.size
