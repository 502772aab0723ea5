"""Which way of summing was measured to be fastest, by group of ranks and size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

# The schedules of schedules.py; the backend's own all-reduce, and whole vectors to everybody.
Schedule = Literal["ring", "halving", "round-robin", "two-level"]
Algorithm = Literal["backend", "direct", Schedule]


class Winner(BaseModel):
    """The fastest way to sum a vector of so many bytes in groups of this kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    ranks: int = Field(ge=2)  # of a group
    switches: int = Field(ge=1)  # that a group's ranks lie at
    bytes: int = Field(ge=1)
    algorithm: Algorithm
    seconds: float = Field(ge=0)


def check_winners(winners: Iterable[Winner]) -> None:
    """Refuses two winners of one race, and groups on more switches than they have ranks."""
    seen = set()
    for place, winner in enumerate(winners):
        race = (winner.ranks, winner.switches, winner.bytes)
        if race in seen:
            raise ValueError(
                f"sums.{place} is the second for {winner.ranks} ranks at "
                f"{winner.switches} switches and {winner.bytes} bytes"
            )
        if winner.switches > winner.ranks:
            raise ValueError(
                f"sums.{place}: {winner.ranks} ranks cannot lie at {winner.switches} switches"
            )
        seen.add(race)


def fastest(
    winners: Sequence[Winner], num_ranks: int, num_switches: int, nbytes: int
) -> Algorithm | None:
    """The winner of the measured size that is nearest, in ratio; None where none was measured."""
    known = _of_kind(winners, num_ranks, num_switches)
    if not known:
        return None
    return min(known, key=lambda w: abs(log(w.bytes / max(nbytes, 1)))).algorithm


Measured = tuple[tuple[int, float], ...]  # bytes and seconds of winners, by rising bytes


def measured(winners: Sequence[Winner], num_ranks: int, num_switches: int) -> Measured:
    """What sums in groups of this kind were measured to take; empty where none was measured."""
    known = _of_kind(winners, num_ranks, num_switches)
    return tuple(sorted((w.bytes, w.seconds) for w in known))


def _of_kind(winners: Sequence[Winner], num_ranks: int, num_switches: int) -> list[Winner]:
    return [w for w in winners if (w.ranks, w.switches) == (num_ranks, num_switches)]


def seconds_of(table: Measured, nbytes: np.ndarray) -> np.ndarray:
    """The seconds of sums, on straight lines between what was measured.

    Smaller sums take as long as the smallest, larger ones as long per byte as the largest.
    """
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*table, strict=True))
    beyond = np.maximum(nbytes / sizes[-1], 1.0)
    return np.where(nbytes > 0, np.interp(nbytes, sizes, seconds) * beyond, 0.0)
