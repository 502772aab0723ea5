"""The layouts of many configs at once: what they have in common is kept once."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import numpy as np


class Columns:
    """Columns of ranges: one dimension's range for each rank. Each different one is kept once."""

    def __init__(self, world: int) -> None:
        self.world, self.count = world, 0
        self._ranges = np.empty((64, world, 2), dtype=np.int32)
        self._place = np.empty((64, world), dtype=np.int32)  # of each rank among the different
        self._first: list[np.ndarray] = []  # the first rank of each different range
        self._pattern, self._users = list[int](), list[int]()
        self._numbers: dict[int, int] = {}
        self._kinds: dict[bytes, int] = {}
        self._clipped: dict[tuple[int, int], int] = {}
        self._layouts: dict[Hashable, Layouts] = {}
        self._mix = np.random.default_rng(7).integers(1, 1 << 62, size=world + 1)

    def of(self, bounds: np.ndarray) -> np.ndarray:
        """The numbers of the columns of layouts, from boxes; [layouts, ndim].

        Boxes are [layouts, world, ndim, 2]. Columns are told apart by a sum of their numbers with
        random weights, modulo 2^64.
        """
        count, world, ndim, _ = bounds.shape
        sums = np.matmul(self._mix[1:], bounds.reshape(count, world, 2 * ndim))
        keys = (sums[:, 0::2] * self._mix[0] + sums[:, 1::2]).ravel().tolist()
        for key in set(keys).difference(self._numbers):
            layout, dim = divmod(keys.index(key), ndim)
            self._numbers[key] = self._add(bounds[layout, :, dim])
        return np.array([self._numbers[key] for key in keys]).reshape(count, ndim)

    def _add(self, ranges: np.ndarray) -> int:
        if self.count == len(self._ranges):
            self._ranges = np.concatenate([self._ranges, np.empty_like(self._ranges)])
            self._place = np.concatenate([self._place, np.empty_like(self._place)])
        packed = (ranges[:, 0].astype(np.int64) << 32) + ranges[:, 1]
        _, first, place = np.unique(packed, return_index=True, return_inverse=True)
        self._ranges[self.count], self._place[self.count] = ranges, place.reshape(-1)
        self._first.append(first)
        self.count += 1
        firsts = self.firsts(self.count - 1)
        for kinds, alike in ((self._pattern, firsts), (self._users, firsts >= 0)):
            kinds.append(self._kinds.setdefault(alike.tobytes(), len(self._kinds)))
        return self.count - 1

    def ranges(self, columns: np.ndarray) -> np.ndarray:
        """The ranges of these columns; int32 [columns, world, 2]."""
        return self._ranges[columns]

    def boxes(self, rows: np.ndarray) -> np.ndarray:
        """The boxes of layouts with these columns; [..., ndim] to int64 [..., world, ndim, 2]."""
        return np.ascontiguousarray(self._ranges[rows].swapaxes(-3, -2), dtype=np.int64)

    def firsts(self, column: int) -> np.ndarray:
        """The first rank that has the same range, for each rank; -1 where it has nothing."""
        used = self._ranges[column, :, 1] > self._ranges[column, :, 0]
        return np.where(used, self._first[column][self._place[column]], -1)

    def different(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The different ranges of each column, one after the other, how many each column has, and
        which of them each rank has; [k, 2], [columns], [columns, world]."""
        firsts = [self._first[column] for column in columns.tolist()]
        counts = np.array([len(first) for first in firsts])
        values = self._ranges[np.repeat(columns, counts), np.concatenate(firsts)]
        return values, counts, self._place[columns] + (np.cumsum(counts) - counts)[:, None]

    def inside(self, column: int, size: int) -> int:
        """The column without what reaches beyond a dimension of this size."""
        if (column, size) not in self._clipped:
            ranges, clipped = self._ranges[column], column
            if ranges.min() < 0 or ranges.max() > size:
                ranges = np.clip(ranges, 0, size).astype(np.int64)
                ranges *= (ranges[:, 1] > ranges[:, 0])[:, None]
                clipped = int(self.of(ranges[None, :, None])[0, 0])
            self._clipped[column, size] = clipped
        return self._clipped[column, size]

    def layouts(self, rows: np.ndarray, shape: tuple[int, ...]) -> Layouts:
        """The different layouts of a tensor among those with these columns, found once."""
        key = rows.tobytes(), shape
        if key not in self._layouts:
            self._layouts[key] = Layouts.of(self, rows).inside(shape)
        return self._layouts[key]

    def patterns(self, columns: np.ndarray) -> np.ndarray:
        """Numbers that are the same for columns in which the same ranks have equal ranges."""
        return _picked(self._pattern, columns)

    def users(self, columns: np.ndarray) -> np.ndarray:
        """Numbers that are the same for columns in which the same ranks have anything."""
        return _picked(self._users, columns)


def _picked(numbers: list[int], places: np.ndarray) -> np.ndarray:
    return np.array([numbers[place] for place in places.ravel().tolist()]).reshape(places.shape)


class Layouts:
    """The different layouts among those of many configs, and which each config has."""

    def __init__(self, columns: Columns, rows: np.ndarray, index: np.ndarray) -> None:
        self.columns, self.rows, self.index = columns, rows, index  # [layouts, ndim], [configs]
        self.key = rows.tobytes()  # the same for the same layouts

    @classmethod
    def of(cls, columns: Columns, rows: np.ndarray) -> Layouts:
        """From the columns of the layout of each config; [configs, ndim]."""
        found: dict[tuple[int, ...], int] = {}
        index = [found.setdefault(row, len(found)) for row in map(tuple, rows.tolist())]
        return cls(columns, np.array(list(found)), np.array(index))

    def __len__(self) -> int:
        return len(self.rows)

    def inside(self, shape: tuple[int, ...]) -> Layouts:
        """The same without what reaches beyond the tensor; a box with nothing in it is empty."""
        columns, rows = self.columns, self.rows.copy()
        for dim, (different, place) in enumerate(self.dims):
            clipped = [columns.inside(column, shape[dim]) for column in different.tolist()]
            rows[:, dim] = np.array(clipped)[place]
        users = columns.users(rows)
        for place in np.flatnonzero((users != users[:, :1]).any(axis=1)):
            boxes = columns.boxes(rows[place])
            boxes *= np.all(boxes[..., 1] > boxes[..., 0], axis=-1)[..., None, None]
            rows[place] = columns.of(boxes[None])[0]
        if np.array_equal(rows, self.rows):
            return self
        clipped = Layouts.of(columns, rows)
        return Layouts(columns, clipped.rows, clipped.index[self.index])

    def one(self, place: int) -> Layouts:
        """The layout of one config alone."""
        row = self.rows[self.index[place]]
        return Layouts(self.columns, row[None], np.zeros(1, dtype=np.int64))

    @cached_property
    def dims(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per dimension the different columns, and which of them each layout has."""
        return [np.unique(column, return_inverse=True) for column in self.rows.T]

    def boxes(self, places: np.ndarray) -> np.ndarray:
        """The boxes of some layouts; [layouts, world, ndim, 2]."""
        return self.columns.boxes(self.rows[places])

    def numels(self, ranks: np.ndarray) -> np.ndarray:
        """Elements of each layout's box on these ranks; float [layouts, ranks]."""
        result = np.ones((len(self.rows), len(ranks)))
        for different, place in self.dims:
            ranges = self.columns.ranges(different)[:, ranks]
            result *= (ranges[..., 1] - ranges[..., 0]).astype(float)[place]
        return result
