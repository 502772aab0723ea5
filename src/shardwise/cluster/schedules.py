"""All-reduce algorithms as data: who sends which part of the vector to whom, round by round.

Every algorithm is a reduce-scatter, after which each rank holds the whole sum of one part, and its
mirror image, the all-gather: the same rounds backwards, with what was sent received and the other
way round. A part is summed in one place and copied from there, so all ranks get the same bits.

Workers carry out their own part of a schedule, and the planner works out what the whole costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest

import numpy as np

from shardwise.cluster.measured_sums import Algorithm

Span = tuple[int, int]  # of the vector's numbers: the first, and the first that is not in it
Turn = np.ndarray  # one round of all ranks; int64 [messages, 4]: sender, receiver, start, stop
Switches = tuple["int | Switches", ...]  # a group's ranks by the switch they lie at, if any; nested


@dataclass(frozen=True)
class Message:
    """A part of the vector that goes to a peer, or comes from one."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives at once; what arrives is added, or replaces what was."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    adds: bool = True


Rounds = tuple[Round, ...]


@lru_cache(maxsize=256)
def schedule(algorithm: Algorithm, switches: Switches, rank: int, numel: int) -> Rounds:
    """What a rank does to sum a vector of so many numbers over the ranks of these switches.

    >>> schedule("ring", ((0, 1),), 0, 10)[0]
    Round(sends=(Message(peer=1, start=5, stop=10),), receives=(Message(peer=1, start=0, stop=5),), adds=True)
    """  # noqa: E501
    scatter = [_of_rank(turn, rank) for turn in ALGORITHMS[algorithm](switches, (0, numel))]
    mirror = [Round(one.receives, one.sends, adds=False) for one in reversed(scatter)]
    return (*scatter, *mirror)


def _of_rank(turn: Turn, rank: int) -> Round:
    """One rank's messages; those of no numbers are left out, where ranks outnumber numbers."""
    turn = turn[turn[:, 2] < turn[:, 3]]
    sends, receives = turn[turn[:, 0] == rank, 1:], turn[turn[:, 1] == rank][:, [0, 2, 3]]
    sent, received = (tuple(Message(*row) for row in rows.tolist()) for rows in (sends, receives))
    return Round(sent, received)


def parts(span: Span, count: int) -> np.ndarray:
    """A span cut into so many parts, as even as can be; [count, 2]."""
    edges = span[0] + (span[1] - span[0]) * np.arange(count + 1) // count
    return np.stack([edges[:-1], edges[1:]], axis=1)


# -- reduce-scatters, one turn after the other -----------------------------------------------------


def ring(ranks: np.ndarray, span: Span) -> Iterator[Turn]:
    """Each part travels once around, growing; the i-th rank ends up with the i-th part."""
    cut = parts(span, len(ranks))
    for turn in range(1, len(ranks)):
        yield np.column_stack([ranks, np.roll(ranks, -1), np.roll(cut, turn, axis=0)])


def halving(ranks: np.ndarray, span: Span) -> Iterator[Turn]:
    """Two halves of the ranks swap halves of the vector; then each half does the same (P5, Fig. 7).

    A number of ranks that is no power of two needs no extra rounds: the first half may have one
    rank more, which sends its part to the last rank of the other half and gets nothing back.
    """
    if len(ranks) == 1:
        return
    near, far = np.array_split(ranks, 2)
    partners = far[np.minimum(np.arange(len(near)), len(far) - 1)]
    cut = span[0] + (span[1] - span[0]) * len(near) // len(ranks)
    low, high = (span[0], cut), (cut, span[1])
    yield np.concatenate([_swap(near, partners, high), _swap(far, near[: len(far)], low)])
    yield from _together([halving(near, low), halving(far, high)])


def _swap(senders: np.ndarray, receivers: np.ndarray, span: Span) -> Turn:
    return np.column_stack([senders, receivers, np.tile(span, (len(senders), 1))])


def two_levels(switches: Switches, span: Span) -> Iterator[Turn]:
    """A ring inside every switch, then rings across: only sums of a switch cross the uplinks.

    Where switches have different numbers of ranks, their parts overlap in pieces; each piece has
    one owner per switch and a ring of its own.
    """
    groups = [consecutive((members,)) for members in switches]
    cuts = [parts(span, len(members)) for members in groups]
    yield from _together(ring(members, span) for members in groups)
    edges = np.unique(np.concatenate(cuts)).tolist()
    owners = [
        members[np.searchsorted(cut[:, 1], edges[:-1], "right")]
        for members, cut in zip(groups, cuts, strict=True)
    ]
    yield from _together(map(ring, np.stack(owners, axis=1), pairwise(edges)))


def _together(several: Iterable[Iterator[Turn]]) -> Iterator[Turn]:
    """Turns of ranks that do not meet, at the same time."""
    nothing = np.zeros((0, 4), dtype=np.int64)
    return map(np.concatenate, zip_longest(*several, fillvalue=nothing))


def consecutive(switches: Switches) -> np.ndarray:
    """The ranks one switch after the other."""
    return np.array(list(_ranks(switches)))


def _ranks(switches: Switches) -> Iterator[int]:
    for switch in switches:
        yield from (switch,) if isinstance(switch, int) else _ranks(switch)


def round_robin(switches: Switches) -> np.ndarray:
    """One rank of each switch in turn, so that far partners lie at the same switch (P5)."""
    return np.array(list(_in_turn(switches)))


def _in_turn(switches: Switches) -> Iterator[int]:
    each = ((switch,) if isinstance(switch, int) else _in_turn(switch) for switch in switches)
    return (rank for turn in zip_longest(*each) for rank in turn if rank is not None)


ALGORITHMS: dict[Algorithm, Callable[[Switches, Span], Iterator[Turn]]] = {
    "ring": lambda switches, span: ring(consecutive(switches), span),
    "halving": lambda switches, span: halving(consecutive(switches), span),
    "round-robin": lambda switches, span: halving(round_robin(switches), span),
    "two-level": two_levels,
}
