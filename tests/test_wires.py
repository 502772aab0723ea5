"""Our own connections: the same tensors as over the backend, and only among ranks."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pool import shared_pool
from shardwise import LostPeer, run_local
from shardwise.comm import About, Communicator, connecting
from shardwise.comm.wires import wires

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def _drawn(sender: int, receiver: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * sender + 100 * receiver + number)
    return torch.randn(numel, generator=generator).mul_(100).to(dtype)


def _exchanged(sizes: list[int], dtype: torch.dtype) -> tuple[bool, int]:
    """Many messages to everybody at once, awaited last first; are they right, over how many wires?

    All start before anybody waits: nobody may have to read for another to be able to send.
    """
    comm = Communicator()
    comm.prepare([tuple(range(comm.size))])
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    pending = []
    for number, numel in enumerate(sizes):
        sends = [(r, _drawn(comm.rank, r, number, numel, dtype)) for r in others]
        receives = [(r, torch.empty(numel, dtype=dtype)) for r in others]
        pending.append((number, receives, comm.exchange(sends, receives)))
    right = True
    for number, receives, works in reversed(pending):
        works.wait()
        for rank, x in receives:
            right &= torch.equal(x, _drawn(rank, comm.rank, number, x.numel(), dtype))
    return right, len(wires().known)


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_of_all_sizes_arrive_whole_and_in_order(dtype: torch.dtype) -> None:
    sizes = [1, 0, 1000, 3 << 20, 1, 2 << 20, 7, 1 << 16]
    assert shared_pool(3).run(_exchanged, sizes, dtype) == [(True, 2)] * 3


def _odd_strides() -> list[float]:
    comm, x, y = Communicator(), torch.arange(8.0)[4::4], torch.zeros(8)[::4][1:]
    comm.prepare([(0, 1, 2)])
    assert x.stride() == y.stride() == (4,)
    comm.exchange([((comm.rank + 1) % 3, x + comm.rank)], [((comm.rank - 1) % 3, y)]).wait()
    comm.all_reduce((0, 1, 2), x).wait()
    return [*x.tolist(), *y.tolist()]


def test_a_tensor_of_one_element_may_have_any_strides() -> None:
    assert shared_pool(3).run(_odd_strides) == [[12.0, 6.0], [12.0, 4.0], [12.0, 5.0]]


def _sums(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    comm = Communicator()
    everybody = tuple(range(comm.size))
    comm.prepare([everybody])
    x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    y = x.clone()
    comm.all_reduce(everybody, x).wait()
    comm.all_reduce(everybody, y, algorithm="backend").wait()
    return x, y


@pytest.mark.parametrize("numel", (1, 1000))
def test_a_sum_has_the_same_bits_everywhere(numel: int) -> None:
    ranks = shared_pool(3).run(_sums, numel)
    for x, y in ranks:
        torch.testing.assert_close(x, y)
        assert torch.equal(x, ranks[0][0])


def _exchanged_without_a_listener() -> tuple[bool, int]:
    if Communicator().rank == 1:
        connecting._offer = lambda listener: None
    return _exchanged([1, 5000], torch.float32)


def test_ranks_that_cannot_be_reached_use_the_backend() -> None:
    assert run_local(_exchanged_without_a_listener, 3) == [(True, 0)] * 3


def _lose(how: str) -> str:
    comm = Communicator(timeout=1.0)
    comm.prepare([(0, 1)])
    if comm.rank == 1:
        if how == "closed":
            wires().close()
        time.sleep(2.5)
        return ""
    with pytest.raises(LostPeer) as caught:
        comm.all_reduce((0, 1), torch.ones(3), About("norm statistics")).wait()
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
            assert connecting._greeting(caller, token, time.monotonic() + 5) == rank
