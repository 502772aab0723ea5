"""A config: how one layer is split over the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

# Grid axes, outermost first: samples, depth, height, width, filters (or output channels), input
# channels. Filters before channels: the output of a c x f split then lies in rank order (P2).
AXES = ("n", "d", "h", "w", "f", "c")
SPACE = ("d", "h", "w")
GRADIENTS = ("sum", "gather")
NAMES = ("samples", "depth", "height", "width", "filters", "channels")
AXIS_NAMES = dict(zip(AXES, NAMES, strict=True))


@dataclass(frozen=True)
class Config:
    """Degrees over the grid axes and the ranks that form the grid, in row-major order.

    With gradient="gather" the ranks that share a block of weights do not sum their gradients: they
    gather inputs and errors of all samples, and each computes the whole gradient of the block (P3).

    >>> str(Config(n=2, h=2))
    'n=2 h=2'
    >>> str(Config(f=2, ranks=(1, 3)))
    'f=2 @1,3'
    """

    n: int = 1
    d: int = 1
    h: int = 1
    w: int = 1
    f: int = 1
    c: int = 1
    ranks: tuple[int, ...] = field(default=())
    gradient: str = "sum"  # of the weights: each rank's part is summed, or "gather" (P3)

    def __post_init__(self) -> None:
        if self.gradient not in GRADIENTS:
            raise ValueError(f"gradient {self.gradient!r} must be {' or '.join(GRADIENTS)}")
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"degree {axis}={degree!r} must be a whole number of at least 1")
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.num_workers)))
        if len(self.ranks) != self.num_workers:
            raise ValueError(
                f"{len(self.ranks)} ranks {list(self.ranks)} for a split into {self.num_workers} "
                f"parts ({self._split}); give exactly one rank per part"
            )
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(f"ranks {list(self.ranks)} must be different and not negative")

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @cached_property
    def num_workers(self) -> int:
        return prod(self.degrees)

    def coordinates(self, world: int) -> dict[str, np.ndarray]:
        """Each rank's coordinate along each axis, -1 for ranks that are not used; int64 [world]."""
        found = np.full((len(AXES), world), -1, dtype=np.int64)
        found[:, self.ranks] = np.unravel_index(np.arange(self.num_workers), self.degrees)
        return dict(zip(AXES, found, strict=True))

    @property
    def _split(self) -> str:
        parts = [f"{a}={k}" for a, k in zip(AXES, self.degrees, strict=True) if k > 1]
        return " ".join(parts) or "whole"

    def __str__(self) -> str:
        text = self._split + ("" if self.gradient == "sum" else " gather")
        if self.ranks == tuple(range(self.num_workers)):
            return text
        return f"{text} @{_ranges_text(self.ranks)}"


def _ranges_text(ranks: tuple[int, ...]) -> str:
    """A short form where ranks are evenly spaced: 0:16:4 for 0,4,8,12."""
    if len(ranks) > 2:
        steps = {b - a for a, b in pairwise(ranks)}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            return f"{ranks[0]}:{ranks[-1] + step}:{step}"
    return ",".join(map(str, ranks))
