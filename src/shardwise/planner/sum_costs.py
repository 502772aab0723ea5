"""The time of many sums at once: one per layer and config."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.planner.links import ALGORITHMS, Network


@dataclass(frozen=True, eq=False)
class SumCosts:
    """Sums or exchanges inside segments, for many configs at once."""

    network: Network
    places: np.ndarray  # of the configs among those of a layer
    models: np.ndarray  # of each config's segments, see Network.model
    nbytes: np.ndarray  # of a block
    users: np.ndarray  # the same number where the same ranks have blocks

    @classmethod
    def none(cls, network: Network) -> SumCosts:
        empty = np.zeros(0, dtype=np.int64)
        return cls(network, empty, empty, np.zeros(0), empty)

    def where(self, mask: np.ndarray) -> SumCosts:
        arrays = (self.places, self.models, self.nbytes, self.users)
        return SumCosts(self.network, *(array[mask] for array in arrays))

    def seconds(self) -> np.ndarray:
        """See Network.sum_seconds."""
        models = self.network.rows[self.models]
        fixed, per_byte = models[:, :ALGORITHMS], models[:, ALGORITHMS : 2 * ALGORITHMS]
        seconds = (fixed + per_byte * self.nbytes[:, None]).min(axis=1)
        for number in np.unique(self.models) if self.network.cluster.sums else ():
            if (model := self.network._models[number]).measured:
                mask = self.models == number
                seconds[mask] = model.seconds(self.nbytes[mask])
        return seconds

    def bytes(self) -> np.ndarray:
        """See Network.sum_bytes."""
        return self.network.rows[self.models, -1] * self.nbytes

    def scatter_seconds(self) -> np.ndarray:
        """See Network.scatter_seconds."""
        models = self.network.rows[self.models]
        return models[:, -3] + models[:, -2] * self.nbytes
