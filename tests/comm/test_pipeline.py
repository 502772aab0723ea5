"""Rounds in pieces: nothing is lost, what is sent has arrived, and both ends agree on the order."""

from __future__ import annotations

import pytest

from shardwise.cluster.schedules import ALGORITHMS, Round, Switches, schedule
from shardwise.comm.summing import RoundPiece, pipeline

TOPOLOGIES: list[Switches] = [
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1, 2),),
    ((0,), (1, 2, 3, 4, 5), (6, 7)),
]


def numbers(rounds: tuple[Round, ...], received: bool) -> list[tuple[int, int]]:
    """Every number that goes to or comes from each peer, in order."""
    messages = [m for one in rounds for m in (one.receives if received else one.sends)]
    return [(m.peer, number) for m in messages for number in range(m.start, m.stop)]


def spread(pieces: tuple[RoundPiece, ...]) -> list[tuple[int, int]]:
    return [(piece.peer, number) for piece in pieces for number in range(piece.start, piece.stop)]


@pytest.mark.parametrize("switches", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_pieces_are_the_rounds_and_wait_for_what_they_hold(
    algorithm: str, switches: Switches, chunk: int
) -> None:
    for rank in (r for members in switches for r in members):
        rounds = schedule(algorithm, switches, rank, 100)
        stream = pipeline(rounds, chunk)
        assert spread(stream.sends) == numbers(rounds, received=False)
        assert spread(stream.receives) == numbers(rounds, received=True)
        assert all(piece.stop - piece.start <= chunk for piece in stream.sends)
        assert [p.after for p in stream.sends] == sorted(p.after for p in stream.sends)
        assert _in_time(rounds, stream.sends, stream.receives)


def _in_time(
    rounds: tuple[Round, ...], sends: tuple[RoundPiece, ...], receives: tuple[RoundPiece, ...]
) -> bool:
    """Whether every number that is sent has arrived in all earlier rounds."""
    left, arrived = list(sends), 0
    for one in rounds:
        count = sum(m.stop - m.start for m in one.sends)
        while count > 0:
            piece = left.pop(0)
            count -= piece.stop - piece.start
            late = receives[piece.after : arrived]
            if any(max(p.start, piece.start) < min(p.stop, piece.stop) for p in late):
                return False
        taken = sum(m.stop - m.start for m in one.receives)
        while taken > 0:
            taken -= receives[arrived].stop - receives[arrived].start
            arrived += 1
    return True


def test_a_piece_leaves_before_its_round_would_begin() -> None:
    rounds = schedule("ring", ((0, 1, 2, 3),), 0, 400)
    stream = pipeline(rounds, 10)
    second = stream.sends[10]  # the first piece of the second round
    assert second.after == 1
