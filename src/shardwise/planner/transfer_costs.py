"""The traffic of every transfer between two sets of layouts, as tables for the search.

Between a partition and a cover that are both grids, what ranks and units send, receive and keep is
a product over dimensions of what their columns have in common. So a table of thousands of pairs of
layouts costs little more than its pairs of columns, and nothing of size world x world is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.planner.layout_columns import Columns, Layouts
from shardwise.planner.links import Level, Network

MANY = 16  # ports of a level up to which `Traffic.table` looks at all of them
CACHED = 1 << 16  # numbers of an array that stays in the cache: 512 KiB
ROOM = 1 << 24  # numbers of each kind that are remembered between tables: 128 MiB
CHANNELS = 1  # the dimension in which layers of the same resolution differ


@dataclass(frozen=True, eq=False)
class Table:
    """Per pair of a source and a target layout: the time and the bytes of one transfer."""

    seconds: np.ndarray  # [sources, targets]
    nbytes: np.ndarray


class Traffic:
    """The costs of transfers on a network; what pairs of columns have in common is remembered."""

    def __init__(self, network: Network, itemsize: int) -> None:
        self.network, self.itemsize = network, itemsize
        self._tables: dict[tuple[bytes, bytes, bool], Table] = {}
        self._terms, self._rests = _Known(ROOM), _Known(ROOM)
        self._numels: dict[tuple[bytes, bool], list[np.ndarray]] = {}
        self._are_grids: dict[tuple[bytes, int], np.ndarray] = {}
        self._is_grid: dict[tuple[int, ...], bool] = {}

    @cached_property
    def _some(self) -> tuple[Level, ...]:
        return tuple(level.some(MANY) for level in self.network.levels)

    def ports(self, sampled: bool) -> tuple[Level, ...]:
        """All ports of every level, or some of them."""
        return self._some if sampled else self.network.levels

    def knows(self, held: Layouts, needed: Layouts) -> bool:
        return (held.key, needed.key, False) in self._tables

    def table(self, held: Layouts, needed: Layouts, sampled: bool = False) -> Table:
        """Seconds and bytes between all pairs of layouts.

        `sampled`: a lower bound of the seconds, the time of the busiest of some ports of each
        level. On small clusters of all ports, so that it is exact.
        """
        sampled = sampled and self.network.world > MANY
        key = held.key, needed.key, sampled
        if key not in self._tables:
            self._tables[key] = self._table(held, needed, sampled)
        return self._tables[key]

    def _table(self, held: Layouts, needed: Layouts, sampled: bool) -> Table:
        pairs = _Pairs(self, held, needed, sampled)
        seconds, nbytes = np.zeros((2, len(held), len(needed)))
        for rows in _chunks(pairs.rest):
            seconds[rows], nbytes[rows] = pairs.costs(rows)
        return Table(seconds, nbytes)

    def terms(self, held: Layouts, needed: Layouts, dim: int, sampled: bool) -> np.ndarray:
        """What the columns of one dimension have in common, see `_Terms`; [terms, A, targets]."""
        (mine, _), (theirs, place) = held.dims[dim], needed.dims[dim]

        def make() -> np.ndarray:
            return _Terms(held.columns, mine, theirs, self.ports(sampled), lead=dim == 0).array

        key = mine.tobytes(), theirs.tobytes(), dim == 0, sampled
        return self._terms.get(key, make).take(place, axis=2)

    def rest(self, held: Layouts, needed: Layouts, sampled: bool) -> np.ndarray:
        """The product of the terms of all dimensions but channels; [terms, sources, targets].

        Layers of the same resolution have it in common.
        """
        dims = [dim for dim in range(held.rows.shape[1]) if dim != CHANNELS]

        def make() -> np.ndarray:
            terms = [(self.terms(held, needed, dim, sampled), held.dims[dim][1]) for dim in dims]
            product = np.empty((len(terms[0][0]), len(held), len(needed)))
            for rows in _chunks(product):
                first, *others = (term.take(place[rows], axis=1) for term, place in terms)
                for other in others:
                    first *= other
                product[:, rows] = first
            return product

        ends = [ends.dims[dim] for dim in dims for ends in (held, needed)]
        key = sampled, *(array.tobytes() for end in ends for array in end)
        return self._rests.get(key, make)

    def numels(self, layouts: Layouts, sampled: bool) -> list[np.ndarray]:
        """Elements of each layout's boxes at the ports of every level; [ports, 1, layouts]."""
        key = layouts.key, sampled
        if key not in self._numels:
            ports = self.ports(sampled)
            ranks = np.unique(np.concatenate([port.ranks for port in ports]))
            each = layouts.numels(ranks).T
            self._numels[key] = [
                p.per_unit(each[np.searchsorted(ranks, p.ranks)])[:, None] for p in ports
            ]
        return self._numels[key]

    def are_grids(self, layouts: Layouts, level: int) -> np.ndarray:
        """Whether the boxes of each unit form a grid, for each layout; see `_is_grid`."""
        if (layouts.key, level) not in self._are_grids:
            patterns = np.sort(layouts.columns.patterns(layouts.rows), axis=1).tolist()
            found = []
            for row, pattern in zip(layouts.rows.tolist(), patterns, strict=True):
                if (key := (level, *pattern)) not in self._is_grid:
                    firsts = [layouts.columns.firsts(column) for column in row]
                    self._is_grid[key] = _is_grid(firsts, self.network.levels[level])
                found.append(self._is_grid[key])
            self._are_grids[layouts.key, level] = np.array(found)
        return self._are_grids[layouts.key, level]


def _chunks(array: np.ndarray) -> Iterator[slice]:
    """Slices of the second dimension that stay in the cache."""
    step = max(1, CACHED // max(1, array[:, 0].size))
    for start in range(0, array.shape[1], step):
        yield slice(start, start + step)


class _Known:
    """Arrays that are remembered; those not asked for longest make room for new ones."""

    def __init__(self, room: int) -> None:
        self._arrays: dict[object, np.ndarray] = {}
        self._room = room  # in numbers

    def get(self, key: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        array = self._arrays.pop(key) if key in self._arrays else self._new(make())
        self._arrays[key] = array
        return array

    def _new(self, array: np.ndarray) -> np.ndarray:
        self._room -= array.size
        while self._room < 0 and self._arrays:
            self._room += self._arrays.pop(next(iter(self._arrays))).size
        return array


def _is_grid(firsts: list[np.ndarray], level: Level) -> bool:
    """Whether in every unit the boxes are all combinations of its ranges, each equally often.

    Then a sum over the ranks of a product over dimensions is a product of sums, which is tried with
    random numbers for the ranges. `firsts`: see Columns.
    """
    used = firsts[0] >= 0
    users = np.maximum(level.per_unit(used.astype(float)), 1.0)
    generator = np.random.default_rng(7)
    each, sums = used.astype(float), users
    for first in firsts:
        values = generator.uniform(1.0, 2.0, len(first))[first] * used
        each, sums = each * values, sums * level.per_unit(values) / users
    return np.allclose(level.per_unit(each), sums, rtol=1e-9, atol=0.0)


# -- columns ---------------------------------------------------------------------------------------


class _Terms:
    """What pairs of columns have in common, port by port; one array [terms, A, B] of

    - kept: elements that a port's ranks hold and need themselves,
    - sent: elements that they hold, counted once per rank that needs them,
    - met: how many held ranges the needed range meets that meets most (one term),

    for ranks first, then kept and sent for the units of every further level. In products over
    dimensions, sums over ranks would count each rank once per dimension, so that all but the
    leading dimension are divided by the number of ranks that are summed over.

    Shapes: A columns of sources, B of targets, P points where ranges begin or end.
    """

    def __init__(
        self,
        columns: Columns,
        held: np.ndarray,
        needed: np.ndarray,
        ports: Sequence[Level],
        lead: bool,
    ) -> None:
        self.held, self.needed = (
            np.moveaxis(columns.ranges(ids), 0, 1).astype(float) for ids in (held, needed)
        )  # [world, columns, 2]
        mine, theirs = columns.different(held), columns.different(needed)
        values = np.concatenate([mine[0], theirs[0]])
        self.points, at = np.unique(values, return_inverse=True)
        self.lengths = np.diff(self.points, append=self.points[-1]).astype(float)
        met, needing = np.split(at.reshape(values.shape), [len(mine[0])])
        self.at_held, self.at_needed = met[mine[2]], needing[theirs[2]]  # [columns, world, 2]
        up_to, ranks = self._up_to(lead), ports[0].ranks
        arrays = [
            self._kept(ranks, ranks),
            self._sent(ranks, up_to),
            self._met(met, mine[1], needing, theirs[1]),
        ]
        for port in ports[1:]:
            arrays += self._units(port, up_to, lead)
        self.array = np.concatenate(arrays)

    def _kept(self, holders: np.ndarray, readers: np.ndarray) -> np.ndarray:
        mine, theirs = self.held[holders][:, :, None], self.needed[readers][:, None]
        common = np.minimum(mine[..., 1], theirs[..., 1])
        common -= np.maximum(mine[..., 0], theirs[..., 0])
        return np.maximum(common, 0.0, out=common)

    def _up_to(self, lead: bool) -> np.ndarray:
        """Elements that ranks need below each point, counted once per rank; [P, B]."""
        everyone = np.zeros(self.at_needed.shape[1], dtype=np.int64)
        cover = self._cover(self.at_needed, everyone, 1)[0]
        up_to = np.zeros((len(self.points), len(cover)))
        np.cumsum((cover * self.lengths).T[:-1], axis=0, out=up_to[1:])
        users = np.maximum((self.needed[..., 1] > self.needed[..., 0]).sum(axis=0), 1.0)
        return up_to if lead else up_to / users

    def _cover(self, at: np.ndarray, unit: np.ndarray, count: int) -> np.ndarray:
        """How many ranges of a unit's ranks cover what follows each point; [units, columns, P]."""
        shape = count, len(at), len(self.points)
        cell = (unit * shape[1] + np.arange(shape[1])[:, None]) * shape[2]
        begins, ends = (
            np.bincount((cell + at[..., side]).ravel(), minlength=shape[0] * shape[1] * shape[2])
            for side in (0, 1)
        )
        return np.cumsum((begins - ends).reshape(shape), axis=2).astype(float)

    def _sent(self, ranks: np.ndarray, up_to: np.ndarray) -> np.ndarray:
        at = np.moveaxis(self.at_held[:, ranks], 0, 1)
        return up_to[at[..., 1]] - up_to[at[..., 0]]

    def _met(
        self, held: np.ndarray, num_held: np.ndarray, needed: np.ndarray, num_needed: np.ndarray
    ) -> np.ndarray:
        begins = np.zeros((len(num_held), len(self.points)))
        used = held[:, 1] > held[:, 0]
        begins[np.repeat(np.arange(len(num_held)), num_held)[used], held[used, 0]] = 1.0
        upto = np.cumsum(begins, axis=1)
        start, stop = needed.T
        met = ((upto - begins)[:, stop] - upto[:, start] + 1.0) * (stop > start)
        return np.maximum.reduceat(met, np.cumsum(num_needed) - num_needed, axis=1)[None]

    def _units(self, port: Level, up_to: np.ndarray, lead: bool) -> list[np.ndarray]:
        sent = port.per_unit(self._sent(port.ranks, up_to))
        kept = self._inside(port)
        if not lead:
            used = (ranges[port.ranks] for ranges in (self.held, self.needed))
            used = ((ranges[..., 1] > ranges[..., 0]).astype(float) for ranges in used)
            holders, readers = (np.maximum(port.per_unit(ranks), 1.0) for ranks in used)
            kept /= holders[:, :, None] * readers[:, None, :]
            sent /= holders[:, :, None]
        return [kept, sent]

    def _inside(self, port: Level) -> np.ndarray:
        """What ranks of a unit need and ranks of the same unit hold; [units, A, B]."""
        members = np.diff(port.edges)
        if (members == members[0]).all() and members[0] ** 2 < len(self.points):
            ranks = port.ranks.reshape(len(port), -1).T
            return np.sum([self._kept(m, r) for m in ranks for r in ranks], axis=0)
        mine, theirs = (
            self._cover(at[:, port.ranks], port.places, len(port))
            for at in (self.at_held, self.at_needed)
        )
        return (mine * self.lengths) @ theirs.transpose(0, 2, 1)


# -- layouts ---------------------------------------------------------------------------------------


class _Pairs:
    """Two sets of layouts, ready to be compared some sources at a time."""

    def __init__(self, traffic: Traffic, held: Layouts, needed: Layouts, sampled: bool) -> None:
        self.held, self.needed, self.sampled = held, needed, sampled
        self.ports, self.itemsize = traffic.ports(sampled), traffic.itemsize
        self.rest = traffic.rest(held, needed, sampled)
        self.channels = None
        if held.rows.shape[1] > CHANNELS:
            self.channels = traffic.terms(held, needed, CHANNELS, sampled)
        self.numels = traffic.numels(needed, sampled)
        self.latencies = [port.link.latency for port in self.ports]
        if sampled:  # what passes further out may be overlooked
            self.latencies = np.minimum.accumulate(self.latencies[::-1])[::-1].tolist()
        sizes = [len(self.ports[0])] * 2 + [1] + [len(p) for p in self.ports[1:] for _ in "ks"]
        self.parts = np.cumsum(sizes)[:-1]
        self.grids = [
            (traffic.are_grids(held, level), traffic.are_grids(needed, level))
            for level in range(1, len(self.ports))
        ]

    def costs(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes for some sources and every target."""
        kept, sent, met, *units = np.split(self._terms(rows), self.parts)
        inner, needed = self.ports[0], self.numels[0]
        moved = needed.sum(axis=0) - kept.sum(axis=0)
        if inner.link.staged:
            moves = moved > 0
            time = inner.seconds(needed, needed) * moves
            moved = needed.sum(axis=0) * moves
        else:
            time = inner.seconds(sent, needed, kept)
        latency = np.where(moved > 0, self.latencies[0], 0.0)
        for level in range(1, len(self.ports)):
            inside, outside = units[2 * level - 2], units[2 * level - 1]
            across, crosses = self._across(level, rows, inside, outside, sent)
            time = np.maximum(time, across)
            latency = np.where(crosses, self.latencies[level], latency)
        return time * self.itemsize + latency * met[0], moved * self.itemsize

    def _terms(self, rows: slice) -> np.ndarray:
        """The terms of some sources and every target; [terms, sources, targets]."""
        if self.channels is None:
            return self.rest[:, rows]
        product = self.channels.take(self.held.dims[CHANNELS][1][rows], axis=1)
        return np.multiply(product, self.rest[:, rows], out=product)

    def _across(
        self, level: int, rows: slice, kept: np.ndarray, sent: np.ndarray, by_rank: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The time on the ports of units, and whether anything passes them.

        Where units do not hold or need grids, they are counted rank by rank, or left out where a
        lower bound will do.
        """
        port, needed = self.ports[level], self.numels[level]
        held_grids, needed_grids = self.grids[level - 1]
        grids = held_grids[rows, None] & needed_grids
        regular = grids.all()
        if not regular and not self.sampled:
            kept, sent = kept.copy(), sent.copy()
            for row in np.flatnonzero(~grids.all(axis=1)):
                odd = np.flatnonzero(~grids[row])
                kept[:, row, odd] = self._inside(port, rows.start + int(row), odd)
                sent[:, row, odd] = port.per_unit(by_rank[:, row, odd])
        kept = np.rint(kept)
        seconds, crosses = port.seconds(sent, needed, kept), np.any(needed > kept, axis=0)
        if self.sampled and not regular:
            return seconds * grids, np.logical_and(crosses, grids)
        return seconds, np.asarray(crosses)

    def _inside(self, port: Level, source: int, targets: np.ndarray) -> np.ndarray:
        """What the ranks of each unit need and one of them holds; [units, targets]."""
        held, needed = self.held.boxes(np.array([source]))[0], self.needed.boxes(targets)
        kept = np.zeros(needed.shape[:2])
        for offset in range(int(np.diff(port.edges).max())):
            member = port.edges[port.places] + offset
            there = (member < port.edges[port.places + 1])[:, None, None]
            other = held[np.minimum(member, len(held) - 1)] * there
            low = np.maximum(other[..., 0], needed[..., 0])
            high = np.minimum(other[..., 1], needed[..., 1])
            kept += np.maximum(high - low, 0).prod(axis=2)
        return port.per_unit(kept.T)
