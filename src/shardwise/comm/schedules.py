"""All-reduce algorithms as data: who sends which part of the vector to whom, round by round.

Every algorithm is a reduce-scatter, after which each rank holds the whole sum of one part, and its
mirror image, the all-gather: the same rounds backwards, with what was sent received and the other
way round. A part is summed in one place and copied from there, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest

from shardwise.cluster.measured_sums import Algorithm

Span = tuple[int, int]  # of the vector's numbers: the first, and the first that is not in it


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
Switches = tuple[tuple[int, ...], ...]  # the ranks of a group, by the switch they lie at


@lru_cache(maxsize=256)
def schedule(algorithm: Algorithm, switches: Switches, rank: int, numel: int) -> Rounds:
    """What a rank does to sum a vector of so many numbers over the ranks of these switches.

    >>> schedule("ring", ((0, 1),), 0, 10)[0]
    Round(sends=(Message(peer=1, start=5, stop=10),), receives=(Message(peer=1, start=0, stop=5),), adds=True)
    """  # noqa: E501
    return all_reduce(ALGORITHMS[algorithm](switches, rank, (0, numel)))


def all_reduce(scatter: Rounds) -> Rounds:
    """A reduce-scatter and its mirror image."""
    rounds = tuple(_without_empty(one) for one in scatter)
    mirror = tuple(Round(one.receives, one.sends, adds=False) for one in reversed(rounds))
    return rounds + mirror


def _without_empty(one: Round) -> Round:
    """A vector may have fewer numbers than there are ranks."""
    sends, receives = (
        tuple(message for message in messages if message.start < message.stop)
        for messages in (one.sends, one.receives)
    )
    return Round(sends, receives, one.adds)


def parts(span: Span, count: int) -> list[Span]:
    """A span cut into so many parts, as even as can be."""
    start, numel = span[0], span[1] - span[0]
    return list(pairwise(start + numel * place // count for place in range(count + 1)))


# -- reduce-scatters -------------------------------------------------------------------------------


def ring(ranks: Sequence[int], rank: int, span: Span) -> Rounds:
    """Each part travels once around, growing; the i-th rank ends up with the i-th part."""
    place, count, cut = ranks.index(rank), len(ranks), parts(span, len(ranks))
    ahead, behind = ranks[(place + 1) % count], ranks[place - 1]
    return tuple(
        Round(
            (Message(ahead, *cut[(place - 1 - turn) % count]),),
            (Message(behind, *cut[(place - 2 - turn) % count]),),
        )
        for turn in range(count - 1)
    )


def halving(ranks: Sequence[int], rank: int, span: Span) -> Rounds:
    """Two halves of the ranks swap halves of the vector; then each half does the same (P5, Fig. 7).

    A number of ranks that is no power of two needs no extra rounds: the first half may have one
    rank more, which sends its part to the last rank of the other half and gets nothing back.
    """
    if len(ranks) == 1:
        return ()
    middle = (len(ranks) + 1) // 2
    near, far = ranks[:middle], ranks[middle:]
    place, last = ranks.index(rank), len(far) - 1
    cut = span[0] + (span[1] - span[0]) * middle // len(ranks)
    low, high = (span[0], cut), (cut, span[1])
    if place < middle:
        partner = far[min(place, last)]
        receives = (Message(partner, *low),) if place <= last else ()
        return (Round((Message(partner, *high),), receives), *halving(near, rank, low))
    place -= middle
    partners = near[place : place + 1] if place < last else near[place:]
    receives = tuple(Message(partner, *high) for partner in partners)
    return (Round((Message(near[place], *low),), receives), *halving(far, rank, high))


def two_levels(switches: Switches, rank: int, span: Span) -> Rounds:
    """A ring inside every switch, then rings across: only sums of a switch cross the uplinks.

    Where switches have different numbers of ranks, their parts overlap in pieces; each piece has
    one owner per switch and a ring of its own.
    """
    (own,) = (members for members in switches if rank in members)
    inside = ring(own, rank, span)
    rings = [ring(owners, rank, piece) for piece, owners in _pieces(switches, span, rank)]
    across = zip_longest(*rings, fillvalue=Round((), ()))
    return inside + tuple(
        Round(
            tuple(message for one in turn for message in one.sends),
            tuple(message for one in turn for message in one.receives),
        )
        for turn in across
    )


def _pieces(switches: Switches, span: Span, rank: int) -> list[tuple[Span, list[int]]]:
    """The pieces of a rank's part that have one owner in every switch, with these owners."""
    cuts = [parts(span, len(members)) for members in switches]
    edges = sorted({edge for cut in cuts for part in cut for edge in part})
    found = []
    for start, stop in pairwise(edges):
        owners = [
            next(r for r, part in zip(members, cut, strict=True) if part[0] <= start < part[1])
            for members, cut in zip(switches, cuts, strict=True)
        ]
        if rank in owners:
            found.append(((start, stop), owners))
    return found


def consecutive(switches: Switches) -> list[int]:
    """The ranks one switch after the other."""
    return [rank for members in switches for rank in members]


def round_robin(switches: Switches) -> list[int]:
    """One rank of each switch in turn, so that far partners lie at the same switch (P5)."""
    turns = zip_longest(*switches)
    return [rank for turn in turns for rank in turn if rank is not None]


ALGORITHMS: dict[Algorithm, Callable[[Switches, int, Span], Rounds]] = {
    "ring": lambda switches, rank, span: ring(consecutive(switches), rank, span),
    "halving": lambda switches, rank, span: halving(consecutive(switches), rank, span),
    "round-robin": lambda switches, rank, span: halving(round_robin(switches), rank, span),
    "two-level": two_levels,
}
