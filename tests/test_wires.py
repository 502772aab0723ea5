"""Small sums over our own connections: the same result as the backend's, and only among ranks."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pool import shared_pool
from shardwise import LostPeer, run_local
from shardwise.comm import About, Communicator
from shardwise.comm import wires as module
from shardwise.comm.wires import Wires, wires

GROUPS = ((0, 1, 2), (0, 2), (1, 2))


def _sums(dtype: torch.dtype, numel: int) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """For each group of this rank: the sum at once, the backend's, and whether it was ours."""
    comm, found = Communicator(), []
    comm.prepare(GROUPS)
    for number, ranks in enumerate(GROUPS):
        if comm.rank not in ranks:
            continue
        generator = torch.Generator().manual_seed(10 * number + comm.rank)
        x = torch.randn(2, numel, dtype=dtype, generator=generator)
        y = x.clone()
        ours = comm._wired(ranks, x)
        comm.all_reduce(ranks, x, at_once=True).wait()
        comm.all_reduce(ranks, y, algorithm="backend").wait()
        found.append((x, y, ours))
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("numel", (0, 1, 1000, 4096, 4097))
def test_a_sum_at_once_is_the_sum_with_the_same_bits_everywhere(
    dtype: torch.dtype, numel: int
) -> None:
    ranks = shared_pool(3).run(_sums, dtype, numel)
    small = 2 * numel * dtype.itemsize <= 64 << 10
    for own in ranks:
        for x, y, ours in own:
            torch.testing.assert_close(x, y)
            assert ours == small
    for here, there in ((ranks[0][0], ranks[2][0]), (ranks[0][1], ranks[2][1])):
        assert torch.equal(here[0], there[0])


def _sums_without_a_listener() -> tuple[list[tuple[torch.Tensor, torch.Tensor, bool]], bool]:
    if Communicator().rank == 1:
        module._offer = lambda listener: None
    return _sums(torch.float64, 5), wires().works


def test_ranks_that_cannot_be_reached_sum_through_the_backend() -> None:
    for own, works in run_local(_sums_without_a_listener, 3):
        assert not works
        for x, y, ours in own:
            torch.testing.assert_close(x, y)
            assert not ours


def _lose(how: str) -> str:
    comm = Communicator(timeout=1.0)
    comm.prepare([(0, 1)])
    if comm.rank == 1:
        if how == "closed":
            wires().close()
        time.sleep(2.5)
        return ""
    with pytest.raises(LostPeer) as caught:
        comm.all_reduce((0, 1), torch.ones(3), About("norm statistics"), at_once=True)
    return str(caught.value)


@pytest.mark.parametrize(("how", "why"), (("closed", "onnection"), ("silent", "timed out")))
def test_a_peer_that_is_lost_is_named(how: str, why: str) -> None:
    sentence = run_local(_lose, 2, how)[0]
    assert sentence.startswith("rank 0 waited in vain for rank 1 in the sum of norm statistics")
    assert why in sentence


@contextmanager
def _called(greeting: bytes) -> Iterator[socket.socket]:
    """The end of a connection whose other end has said this and hung up."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(greeting)
        there.shutdown(socket.SHUT_WR)
        yield here


def test_strangers_are_not_let_in() -> None:
    token = bytes(range(16))
    for greeting, rank in (
        (token + struct.pack("!I", 7), 7),
        (bytes(16) + struct.pack("!I", 7), None),
        (token, None),
        (b"", None),
    ):
        with _called(greeting) as caller:
            assert module._greeting(caller, token) == rank


def test_without_a_peer_a_sum_is_what_it_was() -> None:
    x = np.arange(3.0)
    Wires().sum({4: 4}, 4, x)
    assert x.tolist() == [0.0, 1.0, 2.0]
