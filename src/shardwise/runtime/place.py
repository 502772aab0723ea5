"""Where a block lies: of which tensor it is, and who has the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from shardwise.comm import Communicator
from shardwise.geometry.layout import Layout


@dataclass(frozen=True, eq=False)
class Place:
    """Of which tensor something is a block, and who has the others."""

    name: str
    layout: Layout
    comm: Communicator

    def __deepcopy__(self, memo: Any) -> Place:
        return self

    @cached_property
    def counts(self) -> bool:
        """Whether this rank's block goes into sums: of those that are the same only one does."""
        rank = self.comm.rank
        return bool(self.layout.numels[rank]) and self.layout.segment(rank)[0] == rank

    @property
    def numel(self) -> int:
        return prod(self.layout.shape)

    def fits(self, other: Place) -> bool:
        """Whether the same rank has the same elements of both, wherever there are any."""
        same = self.comm.members() == other.comm.members()
        return same and self.layout == other.layout


def by_ranks(places: Sequence[Place]) -> list[list[int]]:
    """Which of these lie on the same ranks: those talk about them, all in the same order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, place in enumerate(places):
        found.setdefault(place.comm.members(), []).append(index)
    return [found[members] for members in sorted(found)]
