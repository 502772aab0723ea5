"""A layout: which box of a global tensor each rank holds or needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.geometry.box import Box

Ranges = np.ndarray  # int64 [world, 2]: one half-open range per rank


def blocks(size: int, degree: int) -> Ranges:
    """The balanced blocks of `size` indices, one per part; [degree, 2].

    With floors, the blocks of a degree a*b nest exactly inside those of degree a, so that
    splitting twice and splitting once give the same blocks.

    >>> blocks(5, 2).tolist()
    [[0, 2], [2, 5]]
    """
    return block(size, np.arange(degree, dtype=np.int64), degree)


def block(size: int, index: np.ndarray, degree: int | np.ndarray) -> Ranges:
    """The blocks of these indices; see `blocks`."""
    found = np.empty((len(index), 2), dtype=np.int64)
    np.floor_divide(index * size, degree, out=found[:, 0])
    np.floor_divide((index + 1) * size, degree, out=found[:, 1])
    return found


@dataclass(frozen=True, eq=False)
class Layout:
    """A box per rank of a tensor of this shape.

    A *partition* gives every element to exactly one rank; a *cover* may overlap, and its boxes may
    reach beyond the tensor (the padding of a convolution). An empty box is all zeros.
    """

    shape: tuple[int, ...]
    bounds: np.ndarray  # int64 [world, ndim, 2]

    @classmethod
    def of(cls, shape: Sequence[int], ranges: Sequence[Ranges]) -> Layout:
        """The layout whose box of rank r is the product over dimensions of ranges[dim][r]."""
        bounds = np.empty((len(ranges[0]), len(ranges), 2), dtype=np.int64)
        for dim, found in enumerate(ranges):
            bounds[:, dim] = found
        empty = (bounds[..., 1] <= bounds[..., 0]).any(axis=1)
        if empty.any():
            bounds[empty] = 0
        bounds.setflags(write=False)
        return cls(tuple(shape), bounds)

    @classmethod
    def replicated(cls, shape: Sequence[int], world: int) -> Layout:
        """Every rank holds the whole tensor."""
        return cls.on(shape, world, range(world))

    @classmethod
    def on(cls, shape: Sequence[int], world: int, ranks: Sequence[int]) -> Layout:
        """The given ranks hold the whole tensor, the others nothing."""
        used = np.isin(np.arange(world), np.asarray(list(ranks), dtype=np.int64))
        return cls.of(shape, [np.outer(used, [0, size]) for size in shape])

    @property
    def world(self) -> int:
        return self.bounds.shape[0]

    def __getitem__(self, rank: int) -> Box:
        starts, stops = self.bounds[rank].T.tolist()
        return Box(tuple(starts), tuple(stops))

    @cached_property
    def numels(self) -> np.ndarray:
        """Elements per rank, padding beyond the tensor included; int64 [world]."""
        return (self.bounds[..., 1] - self.bounds[..., 0]).prod(axis=1)

    def overlaps(self, other: Layout) -> np.ndarray:
        """Elements of my rank r's box inside other's rank q's box; int64 [world, world]."""
        found = np.ones((self.world, other.world), dtype=np.int64)
        for dim in range(self.bounds.shape[1]):  # of 2,048 ranks all dims at once take a gigabyte
            mine, theirs = self.bounds[:, dim], other.bounds[:, dim]
            if (mine == mine[0]).all() and (theirs == theirs[0]).all():
                mine, theirs = mine[:1], theirs[:1]  # nobody splits this dim
            sizes = np.minimum.outer(mine[:, 1], theirs[:, 1])
            sizes -= np.maximum.outer(mine[:, 0], theirs[:, 0])
            found *= np.maximum(sizes, 0, out=sizes)
        return found

    @cached_property
    def is_partition(self) -> bool:
        """Every element belongs to exactly one rank."""
        numel = int(np.prod(self.shape, dtype=np.int64))
        starts, stops = self.bounds[..., 0], self.bounds[..., 1]
        inside = bool((starts >= 0).all() and (stops <= np.asarray(self.shape)).all())
        return int(self.numels.sum()) == numel and inside and self.is_disjoint

    def is_within(self, other: Layout) -> bool:
        """Whether every rank's box lies inside its box of the other layout."""
        starts = self.bounds[..., 0] >= other.bounds[..., 0]
        stops = self.bounds[..., 1] <= other.bounds[..., 1]
        return bool(((self.numels == 0) | (starts & stops).all(axis=1)).all())

    @cached_property
    def is_disjoint(self) -> bool:
        """No element belongs to two ranks."""
        used = self.bounds[self.numels > 0]
        if _is_grid(used):
            return True
        overlaps = self.overlaps(self)
        return int(overlaps.sum()) == int(np.trace(overlaps))

    @cached_property
    def is_segmented(self) -> bool:
        """Any two ranks hold the same box or disjoint ones, as the blocks of a weight do."""
        return Layout(self.shape, self.bounds[self._is_first]).is_disjoint

    def owners(self) -> Layout:
        """Of ranks that hold the same box, only the lowest keeps it."""
        kept = self.bounds * self._is_first[:, None, None]
        return Layout.of(self.shape, list(np.moveaxis(kept, 1, 0)))

    def segment(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same box as this one."""
        return tuple(np.flatnonzero(self.holders == self.holders[rank]).tolist())

    @cached_property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """The groups of several ranks that hold the same box."""
        found = map(self.segment, np.flatnonzero(self._is_first).tolist())
        return tuple(ranks for ranks in found if len(ranks) > 1)

    @cached_property
    def holders(self) -> np.ndarray:
        """The first rank that holds the same box, for each rank; -1 for an empty one."""
        return first_holders(self.bounds)

    @property
    def _is_first(self) -> np.ndarray:
        return self.holders == np.arange(self.world)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and self.shape == other.shape
            and np.array_equal(self.bounds, other.bounds)
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.bounds.tobytes()))

    def __str__(self) -> str:
        return " ".join(f"{rank}:{self[rank]}" for rank in range(self.world) if self.numels[rank])


def first_holders(bounds: np.ndarray) -> np.ndarray:
    """The first rank that has the same box, for each rank; -1 for an empty box."""
    rows = bounds.reshape(len(bounds), -1)
    _, first, place = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    empty = (bounds[..., 1] <= bounds[..., 0]).any(axis=1)
    return np.where(empty, -1, first[place.reshape(-1)])


def _is_grid(bounds: np.ndarray) -> bool:
    """Whether boxes are all combinations of disjoint ranges: a quick proof that none overlap."""
    places, count = np.zeros(len(bounds), dtype=np.int64), 1
    for dim in range(bounds.shape[1]):
        starts, first, index = np.unique(bounds[:, dim, 0], return_index=True, return_inverse=True)
        stops = bounds[first, dim, 1]
        if (bounds[:, dim, 1] != stops[index]).any() or (stops[:-1] > starts[1:]).any():
            return False
        places, count = places * len(starts) + index, count * len(starts)
    return len(bounds) <= count and len(np.unique(places)) == len(bounds)
