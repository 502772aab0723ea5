"""The traffic of every transfer between two sets of layouts, as tables for the search.

Between a partition and a cover that are both grids, what a rank sends, receives and keeps is a
product over dimensions, so a table of thousands of pairs of layouts costs no more than their
ranges: nothing of size world x world is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.layout import Layout
from shardwise.network import Level, Network

CACHED = 1 << 17  # numbers of an array that stays in the cache


@dataclass(frozen=True, eq=False)
class Table:
    """Per pair of a source and a target layout: the time and the bytes of one transfer."""

    seconds: np.ndarray  # [sources, targets]
    nbytes: np.ndarray


def transfer_table(
    sources: Sequence[Layout], targets: Sequence[Layout], itemsize: int, network: Network
) -> Table:
    """What it takes to carry a tensor from each source partition to each target cover."""
    shape = sources[0].shape
    held = _Ranges.of(np.stack([s.bounds for s in sources]))
    needed = _Ranges.of(_clipped(np.stack([t.bounds for t in targets]), shape))
    ranks = _Overlaps(held, needed, shape)
    insides = [_Inside(level, held, needed, shape) for level in network.levels[1:]]
    seconds = np.zeros((len(sources), len(targets)))
    nbytes = np.zeros_like(seconds)
    inner = network.levels[0]
    for rows in _chunks(len(sources), len(targets) * network.world):
        kept, sent = ranks.kept(rows), ranks.sent(rows)
        out, into = sent - kept, needed.numels - kept
        moved = into.sum(axis=-1)
        if inner.link.staged:
            out = into = needed.numels * (moved > 0)[..., None]
            moved = into.sum(axis=-1)
        time = inner.seconds(out, into)
        latency = np.where(moved > 0, inner.link.latency, 0.0)
        for inside in insides:
            level, kept = inside.level, inside.kept(rows)
            into = level.per_unit(needed.numels) - kept
            time = np.maximum(time, level.seconds(level.per_unit(sent) - kept, into))
            latency = np.where(into.any(axis=-1), level.link.latency, latency)
        seconds[rows] = time * itemsize + latency * ranks.messages(rows)
        nbytes[rows] = moved * itemsize
    return Table(seconds, nbytes)


def _chunks(count: int, elements: int) -> list[slice]:
    """Rows in blocks whose arrays stay in the cache."""
    step = max(1, CACHED // max(1, elements))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _clipped(bounds: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Boxes without what reaches beyond the tensor."""
    limits = np.asarray(shape)[:, None]
    bounds = np.minimum(np.maximum(bounds, 0), limits)
    empty = (bounds[..., 1] <= bounds[..., 0]).any(axis=-1)
    bounds[empty] = 0
    return bounds


@dataclass(frozen=True, eq=False)
class _Ranges:
    """Many layouts at once; per dimension the different ranges, and which each layout has."""

    ranges: list[np.ndarray]  # per dimension [different, parts, 2]
    index: list[np.ndarray]  # per dimension [layouts]
    numels: np.ndarray  # float [layouts, parts]

    @classmethod
    def of(cls, bounds: np.ndarray) -> _Ranges:
        """From boxes [layouts, parts, ndim, 2]."""
        ranges, index = [], []
        for dim in range(bounds.shape[2]):
            column = np.ascontiguousarray(bounds[:, :, dim])
            found: dict[bytes, int] = {}
            place = [found.setdefault(row.tobytes(), len(found)) for row in column]
            first = [place.index(k) for k in range(len(found))]
            ranges.append(column[first])
            index.append(np.asarray(place))
        numels = (bounds[..., 1] - bounds[..., 0]).prod(axis=2).astype(float)
        return cls(ranges, index, numels)


class _Overlaps:
    """What pairs of layouts have in common, rank by rank, as products over dimensions."""

    def __init__(self, held: _Ranges, needed: _Ranges, shape: tuple[int, ...]) -> None:
        self.held, self.needed = held, needed
        self.users = np.maximum((needed.numels > 0).sum(axis=1, keepdims=True), 1).astype(float)
        self.common, self.readers, self.blocks = [], [], []
        for size, mine, theirs in zip(shape, held.ranges, needed.ranges, strict=True):
            self.common.append(_common(mine[:, None], theirs[None]))
            self.readers.append(_readers(mine, theirs, size))
            self.blocks.append(_blocks_read(mine, theirs, size))

    def _product(self, rows: slice, factors: list[np.ndarray]) -> np.ndarray:
        """The product over dimensions for some sources and every target."""
        result = np.ones(1)
        for factor, held, needed in zip(factors, self.held.index, self.needed.index, strict=True):
            part = factor[held[rows][:, None], needed] if factor.shape[:2] != (1, 1) else factor
            result = (
                result * part if result.shape != part.shape else np.multiply(result, part, result)
            )
        return result

    def kept(self, rows: slice) -> np.ndarray:
        """Elements that each rank holds and needs itself; [sources, targets, parts]."""
        return self._product(rows, self.common)

    def sent(self, rows: slice) -> np.ndarray:
        """Elements of each part that ranks need, counted once per rank that needs them."""
        product = self._product(rows, self.readers)
        return product / self.users ** (len(self.readers) - 1)

    def messages(self, rows: slice) -> np.ndarray:
        """Messages to the rank that gets most; [sources, targets]."""
        return self._product(rows, self.blocks)


def _common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    starts = np.maximum(a[..., 0], b[..., 0])
    return np.maximum(np.minimum(a[..., 1], b[..., 1]) - starts, 0).astype(float)


def _readers(held: np.ndarray, needed: np.ndarray, size: int) -> np.ndarray:
    """Indices of each held range, counted once per rank that needs them; [held, needed, parts]."""
    counts = np.zeros((len(needed), size + 1))
    for row, ranges in zip(counts, needed, strict=True):
        used = ranges[ranges[:, 1] > ranges[:, 0]]
        np.add.at(row, used[:, 0], 1.0)
        np.subtract.at(row, used[:, 1], 1.0)
    running = np.zeros((len(needed), size + 1))
    np.cumsum(np.cumsum(counts, axis=1)[:, :size], axis=1, out=running[:, 1:])
    return np.moveaxis(running[:, held[..., 1]] - running[:, held[..., 0]], 0, 1)


def _blocks_read(held: np.ndarray, needed: np.ndarray, size: int) -> np.ndarray:
    """How many held ranges the needed range meets that meets most; [held, needed]."""
    begins = np.zeros((len(held), size + 1))
    for row, ranges in zip(begins, held, strict=True):
        row[ranges[ranges[:, 1] > ranges[:, 0], 0]] = 1.0
    index = np.cumsum(begins, axis=1)
    used = needed[..., 1] > needed[..., 0]
    last = np.maximum(needed[..., 1] - 1, 0)
    met = (index[:, last] - index[:, needed[..., 0]] + 1.0) * used
    return met.max(axis=-1)


class _Inside:
    """What the ranks of a unit need and one of them holds: it never leaves the unit."""

    def __init__(
        self, level: Level, held: _Ranges, needed: _Ranges, shape: tuple[int, ...]
    ) -> None:
        self.level = level
        world = held.numels.shape[1]
        boxes = np.stack([r[i] for r, i in zip(held.ranges, held.index, strict=True)], axis=2)
        hulls = _hulls(boxes, held.numels, level.starts)
        full = (hulls[..., 1] - hulls[..., 0]).prod(axis=2)
        self.exact = (full == level.per_unit(held.numels)).all(axis=1)  # what they hold is a box
        unit = np.searchsorted(level.starts, np.arange(world), side="right") - 1
        self.of_unit = _Overlaps(_Ranges.of(hulls[:, unit]), needed, shape)
        self.members = [] if self.exact.all() else self._members(boxes, unit, needed, shape)

    def _members(
        self, boxes: np.ndarray, unit: np.ndarray, needed: _Ranges, shape: tuple[int, ...]
    ) -> list[_Overlaps]:
        """One term per member of the largest unit: what it holds against what each rank needs."""
        starts = np.append(self.level.starts, len(unit))
        found = []
        for offset in range(int(np.diff(starts).max())):
            member = starts[unit] + offset
            there = (member < starts[unit + 1])[:, None, None]
            found.append(boxes[:, np.minimum(member, len(unit) - 1)] * there)
        return [_Overlaps(_Ranges.of(b), needed, shape) for b in found]

    def kept(self, rows: slice) -> np.ndarray:
        """Elements per unit, counted once per rank that needs them; [sources, targets, units]."""
        if self.exact[rows].all():
            return self.level.per_unit(self.of_unit.kept(rows))
        kept = [overlaps.kept(rows) for overlaps in self.members]
        return self.level.per_unit(np.sum(kept, axis=0))


def _hulls(boxes: np.ndarray, numels: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The smallest boxes around what the ranks of each unit hold; [layouts, units, ndim, 2]."""
    far = np.iinfo(np.int64).max
    empty = (numels == 0)[..., None]
    low = np.minimum.reduceat(np.where(empty, far, boxes[..., 0]), starts, axis=1)
    high = np.maximum.reduceat(np.where(empty, 0, boxes[..., 1]), starts, axis=1)
    low = np.where(high == 0, 0, low)
    return np.stack([low, high], axis=-1)
