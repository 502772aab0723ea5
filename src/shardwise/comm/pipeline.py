"""A rank's rounds as one stream of pieces, so that a round begins before the last one is over.

A piece is sent as soon as what it holds has arrived, whatever else of its round is still under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwise.cluster.schedules import Message, Round, Rounds


@dataclass(frozen=True)
class RoundPiece:
    """A piece of a message, and how many receives must be done before it is sent."""

    peer: int
    start: int
    stop: int
    adds: bool
    after: int = 0


@dataclass(frozen=True)
class Pipeline:
    """What one rank sends and receives, each in the order of the rounds."""

    sends: tuple[RoundPiece, ...]
    receives: tuple[RoundPiece, ...]


@lru_cache(maxsize=256)
def pipeline(rounds: Rounds, chunk: int) -> Pipeline:
    """The rounds in pieces of at most so many numbers, cut alike at both ends.

    >>> hop = Round((Message(1, 0, 4),), (Message(1, 4, 8),)), Round((Message(1, 4, 8),), ())
    >>> [(piece.start, piece.after) for piece in pipeline(hop, 2).sends]
    [(0, 0), (2, 0), (4, 1), (6, 2)]
    """
    sends: list[RoundPiece] = []
    receives: list[RoundPiece] = []
    arrived: list[tuple[int, Message]] = []  # with the place of its first piece among all
    for one in rounds:
        for cut in _cut(one.sends, one, chunk):
            after = max(_needed(cut, arrived, chunk), sends[-1].after if sends else 0)
            sends.append(RoundPiece(cut.peer, cut.start, cut.stop, cut.adds, after))
        for message in one.receives:
            arrived.append((len(receives), message))
            receives += _cut((message,), one, chunk)
    return Pipeline(tuple(sends), tuple(receives))


def _cut(messages: tuple[Message, ...], one: Round, chunk: int) -> Iterator[RoundPiece]:
    for message in messages:
        for start in range(message.start, message.stop, chunk):
            yield RoundPiece(message.peer, start, min(start + chunk, message.stop), one.adds)


def _needed(piece: RoundPiece, arrived: list[tuple[int, Message]], chunk: int) -> int:
    """How many receives there are up to the last one that overlaps a piece."""
    for place, message in reversed(arrived):
        last = min(piece.stop, message.stop)
        if max(piece.start, message.start) < last:
            return place + (last - 1 - message.start) // chunk + 1
    return 0
