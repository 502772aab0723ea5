"""The order of samples: a shuffle by (seed, epoch), and where in it a run stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.errors import ShardwiseError

SHUFFLE, AUGMENT, MIX = 0, 1, 2  # what random bits are for: different purposes, different bits


def random_bits(num: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """64 random bits per sample, by number and not by the order in which samples are read.

    numpy keeps the raw streams of its generators the same in all versions, unlike what its
    distributions make of them; so a run can be resumed with another numpy.
    """
    key = np.random.SeedSequence((seed, epoch, purpose))
    return np.random.Philox(key).random_raw(num)


def shuffled(num: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch's samples, the same for any number of ranks and any plan.

    >>> sorted(shuffled(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(random_bits(num, seed, epoch, SHUFFLE), kind="stable")


def mixing_share(alpha: float, seed: int, epoch: int, position: int) -> float:
    """How much of its own a batch keeps when it is mixed: a number drawn from Beta(alpha, alpha).

    Jöhnk's way: two powers of uniform numbers, if they are together at most 1.

    >>> 0 < mixing_share(0.2, seed=0, epoch=1, position=64) < 1
    True
    """
    bits = np.random.Philox(np.random.SeedSequence((seed, epoch, MIX, position))).random_raw(
        1 << 16
    )
    pairs = ((bits >> np.uint64(11)) + 0.5).reshape(-1, 2) / 2.0**53
    with np.errstate(under="ignore"):
        powers = pairs ** (1 / alpha)
    sums = powers.sum(axis=1)
    fitting = np.flatnonzero((sums <= 1) & (sums > 0))
    if not len(fitting):  # a large alpha: all are close to one half
        return 0.5
    return float(powers[fitting[0], 0] / sums[fitting[0]])


@dataclass
class Batches:
    """The global batches of an epoch, as numbers of samples, from where the run stands.

    The position counts samples, so that a run goes on with any number of ranks and any batch size.
    """

    num_samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    epoch: int = 0
    position: int = 0  # samples of this epoch that have been given out

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("batch", 1), ("seed", 0), ("epoch", 0)):
            if getattr(self, name) < least:
                raise ShardwiseError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.drop_last and self.batch > self.num_samples:
            raise ShardwiseError(
                f"batch={self.batch} is more than the {self.num_samples} samples, and the last, "
                "smaller batch is dropped: no batch is left"
            )

    @property
    def end(self) -> int:
        """Where the epoch's last batch ends."""
        rest = (self.num_samples - self.position) % self.batch if self.drop_last else 0
        return self.num_samples - rest

    def __len__(self) -> int:
        """How many batches of this epoch are left."""
        return max(0, -(-(self.end - self.position) // self.batch))

    def remaining(self) -> Iterator[np.ndarray]:
        """The batches that are left; to read ahead, so the position does not move."""
        if self.shuffle:
            order = shuffled(self.num_samples, self.seed, self.epoch)
        else:
            order = np.arange(self.num_samples)
        end = self.end
        for start in range(self.position, end, self.batch):
            yield order[start : min(start + self.batch, end)]

    def next_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the run stands, in plain numbers, the same on every rank."""
        names = ("num_samples", "seed", "shuffle", "epoch", "position")
        return {name: int(getattr(self, name)) for name in names}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where another run stood; it must have been over the same order of samples."""
        mine = self.state_dict()
        for name in mine:
            value = state.get(name) if isinstance(state, Mapping) else None
            if type(value) is not int or value < 0:
                raise ShardwiseError(f"the data position's {name} is {value!r}, and not a count")
            if name not in ("epoch", "position") and value != mine[name]:
                raise ShardwiseError(
                    f"the data position is of a run with {name}={value}, and this one has "
                    f"{name}={mine[name]}"
                )
        if state["position"] > self.num_samples:
            raise ShardwiseError(
                f"the data position {state['position']} is beyond the {self.num_samples} samples"
            )
        self.epoch, self.position = state["epoch"], state["position"]
