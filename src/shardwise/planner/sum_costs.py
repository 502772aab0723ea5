"""What sums take: those over one set of segments, and many at once, one per layer and config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cluster.measured_sums import Measured, seconds_of


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
