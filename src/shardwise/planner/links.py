"""How long traffic takes on the links of a cluster.

A *port* joins a unit (a worker, a host, a switch) to its level's medium. What a transfer or a sum
puts on every port, at every level, decides its time: the busiest port, plus the messages' latency.
The numbers are those of `Link` (cluster/cluster.py). Bandwidth counts in `Level.seconds` and in
`_serve`; latency here, and for tables of transfers in `transfer_costs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.cluster.cluster import Cluster, Link
from shardwise.cluster.measured_sums import Measured, Schedule, measured
from shardwise.cluster.schedules import Switches, consecutive
from shardwise.planner.sum_costs import Ring, SumModel, walked


@dataclass(frozen=True, eq=False)
class Level:
    """One level of links, or some of its ports: the unit of every rank, and who shares a medium."""

    link: Link
    ranks: np.ndarray  # int64, ascending: those of the cluster that lie in these units
    units: np.ndarray  # int64 [ranks], ascending
    groups: np.ndarray  # int64 [ranks], ascending

    @cached_property
    def starts(self) -> np.ndarray:
        """The first rank of every unit."""
        return np.flatnonzero(np.diff(self.units, prepend=-1))

    @cached_property
    def edges(self) -> np.ndarray:
        """The same, and where the last unit ends."""
        return np.append(self.starts, len(self.units))

    @cached_property
    def places(self) -> np.ndarray:
        """Of each rank's unit among the units."""
        return np.repeat(np.arange(len(self)), np.diff(self.edges))

    @cached_property
    def group_starts(self) -> np.ndarray:
        """The first unit of every group."""
        return np.flatnonzero(np.diff(self.groups[self.starts], prepend=-1))

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def rates(self) -> np.ndarray | float:
        """Bytes/s of every unit's port; one number where they are alike."""
        return self.link.rates(self.units[self.starts])

    def per_unit(self, amounts: np.ndarray) -> np.ndarray:
        """Sums over the ranks of every unit; [ranks, ...] to [units, ...]."""
        return amounts if len(self) == len(amounts) else np.add.reduceat(amounts, self.starts)

    def seconds(
        self, sent: np.ndarray, received: np.ndarray, kept: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """The time of the busiest port, from what its ranks send and get; [units, ...] to [...].

        What ports keep does not pass them.
        """
        if self.link.shared:
            sent, received = (
                np.add.reduceat(amounts - kept, self.group_starts) for amounts in (sent, received)
            )
            kept = 0.0
        busiest = np.maximum(sent, received)
        busiest -= kept
        if isinstance(self.rates, float):
            return busiest.max(axis=0) / self.rates
        return (busiest.T / self.rates).T.max(axis=0)

    def some(self, count: int) -> Level:
        """About so many ports of the level: first and last ones of blocks, and others in between.

        Where units share a medium, all units of some groups.
        """
        total, groups = len(self), len(self.group_starts)
        if total <= count:
            return self
        if self.link.shared:
            group = np.repeat(np.arange(groups), np.diff(self.group_starts, append=total))
            few = max(1, count * groups // total)
            picked = np.flatnonzero(np.isin(group, np.linspace(0, group[-1], few).astype(int)))
        else:
            edges = np.linspace(0, total, count // 4 + 1).astype(int)
            within = (np.arange(len(edges) - 1) * 0.618034) % 1.0  # at another place in each block
            middle = edges[:-1] + (within * np.diff(edges)).astype(int)
            picked = np.concatenate([edges[:-1], edges[1:] - 1, middle])
        kept = np.isin(self.places, picked)
        return Level(self.link, self.ranks[kept], self.units[kept], self.groups[kept])


class Network:
    """The links of a cluster between its workers, innermost level first."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        levels = [
            Level(link, np.arange(self.world), cluster.units(index), cluster.groups(index))
            for index, link in enumerate(cluster.links)
        ]
        self.levels = tuple(level for level in levels if len(level) > 1) or (levels[0],)
        self.sum_models: list[SumModel] = []  # what the sums that were asked for cost
        self._numbers: dict[bytes, int] = {}  # of models, by their segments

    def carried(
        self, senders: np.ndarray, receivers: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """The latency of each message, and the time of the busiest port; all start together."""
        latencies, seconds = np.zeros(len(senders)), 0.0
        for level in self.levels:
            crossing = level.units[senders] != level.units[receivers]
            if crossing.any():
                sent, received = (
                    np.bincount(level.units[ends], sizes * crossing, minlength=len(level))
                    for ends in (senders, receivers)
                )
                seconds = max(seconds, float(level.seconds(sent, received)))
                latencies[crossing] = level.link.latency
        return latencies, seconds

    # -- sums ----------------------------------------------------------------------------------

    def sum_seconds(self, segments: np.ndarray, nbytes: float) -> float:
        """The time in which every segment sums a block of so many bytes, all segments at once.

        `segments` numbers the segment of each rank (-1: none). The best algorithm counts: the ring,
        recursive halving and doubling with near or far partners first (P5), or two levels of rings;
        where the cluster's winners were measured, their times count.
        """
        return float(
            self.sum_models[self.sum_model(segments)].seconds(np.asarray(nbytes, dtype=float))
        )

    def sum_model(self, segments: np.ndarray) -> int:
        """The number of what sums over these segments cost, worked out once."""
        key = segments.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.sum_models)
            self.sum_models.append(self._model(segments))
        return self._numbers[key]

    def _model(self, segments: np.ndarray) -> SumModel:
        ring = Ring.of(segments)
        if ring is None:
            return SumModel()
        level = self._highest(ring)
        share = 1.0 if level.link.staged else 1.0 - 1.0 / ring.sizes
        copies = float((2.0 * share * np.ones(len(ring.ranks))).sum())
        sums = tuple(self._sums(ring, level))
        return SumModel(sums, self._scatter(ring, level), copies, self._measured(ring))

    def _measured(self, ring: Ring) -> tuple[Measured, ...]:
        """The winners' times for every kind of segment; none unless all kinds were measured."""
        if not (winners := self.cluster.sums):
            return ()
        spread = ring.kinds([np.array(self.cluster.switches)])
        kinds = {(ranks.shape[1], len(switches)) for switches, ranks in spread.items()}
        tables = [measured(winners, *kind) for kind in sorted(kinds)]
        return tuple(tables) if all(tables) else ()

    def _highest(self, ring: Ring) -> Level:
        """The outermost level that any segment crosses."""
        inside = ring.segments[1:] == ring.segments[:-1]
        return next(
            level
            for level in reversed(self.levels)
            if np.diff(level.units[ring.ranks])[inside].any()
        )

    def _staged(self, ring: Ring, level: Level) -> float:
        """The time per byte of a block in which every copy of it passes the ports of a level."""
        amounts = level.per_unit(np.bincount(ring.ranks, minlength=self.world).astype(float))
        return float(level.seconds(amounts, amounts))

    def _scatter(self, ring: Ring, highest: Level) -> tuple[float, float]:
        """Everybody sends everybody else a part.

        A formula for what these messages take: of 1,024 ranks there are a million, in one round.
        """
        if highest.link.staged:
            return highest.link.latency, self._staged(ring, highest)
        seconds = 0.0
        for level in self.levels:
            pairs = ring.segments * self.world + level.units[ring.ranks]
            _, place, counts = np.unique(pairs, return_inverse=True, return_counts=True)
            outside = 1.0 - counts[place] / ring.sizes
            amounts = np.bincount(level.units[ring.ranks], outside, minlength=len(level))
            seconds = max(seconds, float(level.seconds(amounts, amounts)))
        return highest.link.latency * (ring.size - 1), seconds

    def _sums(self, ring: Ring, level: Level) -> list[tuple[float, float]]:
        """The latency and the time per byte of a block, of every way to sum that is predicted."""
        link, adding = level.link, self.cluster.device.adding
        share = 1.0 - 1.0 / ring.size
        if link.sum_bandwidth is not None:
            return [(link.sum_latency or 0.0, 2.0 * share / link.sum_bandwidth)]
        if link.staged:
            crossing = self._staged(ring, level)
            added = 0.0 if link.adding is None else crossing * link.rate / link.adding
            return [(2.0 * link.latency, 2.0 * crossing + added)]
        added = 0.0 if adding is None else share / adding  # P5's gamma
        found = self.schedules(ring).values()
        return [(latency, per_byte + added) for latency, per_byte in found]

    def schedules(self, ring: Ring) -> dict[Schedule, tuple[float, float]]:
        """What the cluster's schedules take that apply, without additions; if none does, the ring.

        Their switches are the units of the outermost level that is crossed, and those inside.
        """
        crossed = self.levels[1 : self.levels.index(self._highest(ring)) + 1]
        kinds = ring.kinds([level.units for level in reversed(crossed)])
        names: list[Schedule] = [
            name for name in self.cluster.schedules or APPLIES if APPLIES[name](kinds)
        ]
        return {name: walked(name, kinds, self.carried) for name in names or ["ring"]}


def _doubling(kinds: Iterable[Switches]) -> bool:
    """All segments have as many ranks, a power of two."""
    sizes = {len(consecutive(switches)) for switches in kinds}
    return len(sizes) == 1 and sizes.pop().bit_count() == 1


def _even(kinds: Iterable[Switches]) -> bool:
    """All segments have as many ranks at every switch, several, and one has several switches."""
    each = {len(consecutive((switch,))) for switches in kinds for switch in switches}
    return len(each) == 1 and each.pop() > 1 and any(len(switches) > 1 for switches in kinds)


# Which schedules are predicted for which segments; those that run are more general.
APPLIES: dict[Schedule, Callable[[Iterable[Switches]], bool]] = {
    "ring": lambda kinds: True,
    "round-robin": _doubling,
    "halving": _doubling,
    "two-level": _even,
}


# -- messages one after the other: when each of them arrives ---------------------------------------


class PortQueues:
    """The ports of all levels, each of which serves one transfer after the other."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.free = [np.zeros((2, len(level.starts))) for level in network.levels]  # out, in

    def carry(
        self, matrix: np.ndarray, start: np.ndarray, own: np.ndarray | None = None
    ) -> np.ndarray:
        """When each rank has all messages of a transfer, bytes from rank r to rank q.

        On a staged link, what a rank keeps (`own`) crosses it too.
        """
        if not matrix.any():
            return start.copy()
        if own is not None and self.network.levels[0].link.staged:
            matrix = matrix + np.diag(own)
        senders, receivers = np.nonzero(matrix)
        sizes = matrix[senders, receivers]
        done = start[senders].copy()
        latency = 0.0
        for level, free in zip(self.network.levels, self.free, strict=True):
            crossing = level.units[senders] != level.units[receivers]
            if level.link.staged:
                crossing |= senders == receivers
            if crossing.any():
                latency, what = level.link.latency, (sizes[crossing], start[senders[crossing]])
                ends = [
                    _serve(level, free[way], level.units[side[crossing]], *what)
                    for way, side in enumerate((senders, receivers))
                ]
                done[crossing] = np.maximum(done[crossing], np.maximum(*ends))
        messages = max(np.bincount(senders).max(), np.bincount(receivers).max())
        arrival = start.copy()
        np.maximum.at(arrival, receivers, done + latency * float(messages))
        return arrival


def _serve(
    level: Level, free: np.ndarray, units: np.ndarray, sizes: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """When the port of each message's unit has served it and all others of this transfer."""
    count = len(level.starts)
    amounts = np.bincount(units, sizes, minlength=count)
    begin = np.full(count, -np.inf)
    np.maximum.at(begin, units, start)
    if level.link.shared:
        group = level.groups[level.starts]
        total, first = np.zeros(group.max() + 1), np.full(group.max() + 1, -np.inf)
        np.add.at(total, group, amounts)
        np.maximum.at(first, group, np.maximum(begin, free))
        ends = first[group] + total[group] / level.link.rate
    else:
        ends = np.maximum(begin, free) + amounts / level.rates
    used = amounts > 0
    free[used] = ends[used]
    return ends[units]
