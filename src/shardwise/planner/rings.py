"""Ranks that sum together, as a ring, for all groups of one sum at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Ring:
    """The ranks of all segments of several ranks, segment by segment, in rank order."""

    ranks: np.ndarray
    segments: np.ndarray
    sizes: np.ndarray  # of the segment of each rank
    index: np.ndarray  # inside the segment

    @classmethod
    def of(cls, segments: np.ndarray) -> Ring | None:
        used = np.flatnonzero(segments >= 0)
        if len(used) < 2:
            return None
        order = used[np.argsort(segments[used], kind="stable")]
        ids = segments[order]
        first = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
        counts = np.diff(np.append(first, len(ids)))
        sizes = np.repeat(counts, counts)
        keep = sizes > 1
        if not keep.any():
            return None
        index = (np.arange(len(ids)) - np.repeat(first, counts))[keep]
        return cls(order[keep], ids[keep], sizes[keep], index)

    @cached_property
    def size(self) -> int:
        return int(self.sizes.max())

    @cached_property
    def positions(self) -> np.ndarray:
        return np.arange(len(self.ranks))

    @cached_property
    def next(self) -> np.ndarray:
        """The rank that follows each in its segment, the first after the last."""
        last = self.index == self.sizes - 1
        return self.ranks[np.where(last, self.positions - self.sizes + 1, self.positions + 1)]


MIX = np.random.default_rng(7).integers(1, 1 << 62, size=32)


def segments_of(bounds: np.ndarray) -> np.ndarray:
    """The first rank that has the same box, for each rank; -1 for an empty box.

    For many layouts at once: [layouts, world, ndim, 2] to [layouts, world].
    """
    rows = bounds.reshape(*bounds.shape[:2], -1)
    empty = (bounds[..., 1] <= bounds[..., 0]).any(axis=-1)
    mixed = (rows * MIX[: rows.shape[-1]]).sum(axis=-1)  # wraps around; equal for equal rows
    if bounds.shape[1] <= 64:
        first = (mixed[:, :, None] == mixed[:, None, :]).argmax(axis=2)
    else:
        found = (np.unique(row, return_index=True, return_inverse=True) for row in mixed)
        first = np.stack([index[inverse] for _, index, inverse in found])
    return np.where(empty, -1, first)
