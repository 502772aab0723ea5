"""Our own connections: the same tensors as over the backend, and only among ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pool import shared_pool
from shardwise import LostPeer, run_local
from shardwise.comm import About, Communicator, connecting
from shardwise.comm.ranks import _timeout_of, _warn_of_timeout
from shardwise.comm.world_state import world_state
from shardwise.errors import ShardwiseError
from worlds import reachable, run_cases

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
    return right, len(world_state().wires.known)


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
    with reachable(dist.get_rank() != 1):
        return _exchanged([1, 5000], torch.float32)


def test_ranks_that_cannot_be_reached_use_the_backend() -> None:
    assert run_local(_exchanged_without_a_listener, 3) == [(True, 0)] * 3


def _lose(how: str) -> str:
    comm = Communicator(timeout=0.5)
    comm.prepare([(0, 1)])
    if comm.rank == 1:
        if how == "closed":
            world_state().wires.close()
        return ""
    with pytest.raises(LostPeer) as caught:
        comm.all_reduce((0, 1), torch.ones(3), About("norm statistics")).wait()
    return str(caught.value)


def test_a_peer_that_is_lost_is_named() -> None:
    closed, silent = run_cases(_lose, 2, [("closed",), ("silent",)])
    for sentence, why in ((closed[0], "onnection"), (silent[0], "timed out")):
        assert sentence.startswith("rank 0 waited in vain for rank 1 in the sum of norm statistics")
        assert why in sentence


def _wait_long(large: bool, lane: bool) -> float:
    """Seconds until a rank gives up a peer that does not come, which has 30 minutes by default."""
    comm = Communicator(timeout=0.5)
    comm = comm.in_lane("sums") if lane else comm
    comm.prepare([(0, 1)])
    start = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(LostPeer):
            comm.all_reduce((0, 1), torch.ones(LARGE if large else 3)).wait()
    return time.monotonic() - start


def test_the_timeout_that_was_given_holds_whoever_carries_the_message() -> None:
    cases = [(large, lane) for large in (False, True) for lane in (False, True)]
    for case, ranks in zip(cases, run_cases(_wait_long, 2, cases), strict=True):
        assert 0.5 <= ranks[0] < 10, case


def test_a_torch_that_hides_its_timeout_is_one_warning_and_half_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    _warn_of_timeout.cache_clear()
    with pytest.warns(UserWarning, match="given up after 1800 s") as caught:
        assert [_timeout_of(object()) for _ in range(2)] == [1800.0] * 2
    assert len(caught) == 1


# -- ranks that do not do the same thing -----------------------------------------------------------

LARGE = 1 << 19  # numbers that gloo carries


def _raised(communicate: Callable[[], object]) -> str:
    with pytest.raises(ShardwiseError) as caught:
        communicate()
    return str(caught.value)


def _message(
    sent: tuple[int, torch.dtype, str], awaited: tuple[int, torch.dtype, str], reach: bool
) -> tuple[str, float]:
    """Rank 0 sends one thing, rank 1 awaits another, rank 2 awaits what will never come."""
    comm = Communicator(timeout=20.0 if reach else 1.0)
    with reachable(reach):
        comm.prepare([])
    tensors = [torch.ones(numel, dtype=dtype) for numel, dtype, _ in (sent, awaited)]
    sends = {0: [(1, tensors[0])]}.get(comm.rank, [])
    receives = [[(1, torch.ones(3))], [(0, tensors[1])], [(1, torch.ones(3))]][comm.rank]
    about, start = About((sent if comm.rank == 0 else awaited)[2]), time.monotonic()
    sentence = _raised(lambda: comm.exchange(sends, receives, about).wait())
    return sentence, time.monotonic() - start


F32, BOOL = torch.float32, torch.bool
DIFFERENT = {
    "type and purpose": ((256, BOOL, "mul>0"), (256, F32, "conv1 to all")),
    "purpose": ((8, F32, "mul>0"), (8, F32, "conv1>0")),
    "size": ((4, F32, "mul>0"), (8, F32, "mul>0")),
    "large, more": ((2 * LARGE, F32, "mul>0"), (LARGE, F32, "mul>0")),
    "large, fewer": ((LARGE, F32, "mul>0"), (2 * LARGE, F32, "mul>0")),
    "large, purpose": ((LARGE, F32, "mul>0"), (LARGE, F32, "conv1>0")),
    "large for small": ((LARGE, F32, "mul>0"), (4, F32, "mul>0")),
    "small for large": ((4, F32, "mul>0"), (LARGE, F32, "mul>0")),
}


def _described(numel: int, dtype: torch.dtype, name: str) -> str:
    kind = str(dtype).removeprefix("torch.")
    return f"{numel * dtype.itemsize:,} bytes of {kind} for '{name}' (exchange)"


def test_a_message_that_is_not_the_awaited_one_ends_all_ranks_with_one_sentence() -> None:
    found = run_cases(_message, 3, [(*case, True) for case in DIFFERENT.values()])
    for (name, (sent, awaited)), ranks in zip(DIFFERENT.items(), found, strict=True):
        for sentence, seconds in ranks:
            assert seconds < 5, name
            assert sentence == (
                f"rank 0 sent {_described(*sent)} where rank 1 awaits {_described(*awaited)}; "
                "the ranks do not do the same thing"
            )


def test_messages_that_differ_never_meet_where_ranks_are_not_connected() -> None:
    cases = [DIFFERENT[name] for name in ("large, more", "large, fewer", "purpose")]
    for ranks in run_cases(_message, 3, [(*case, False) for case in cases]):
        assert all("waited in vain" in sentence for sentence, _ in ranks)


def _sum(lane: str, algorithm: Any, reach: bool) -> str:
    comm = Communicator(timeout=20.0)
    comm = comm.in_lane(lane) if lane else comm
    with reachable(reach):
        comm.prepare([(0, 1)])
    x, about = torch.ones(30_000), About(f"layer {comm.rank}", "gradients" if lane else "transfer")
    return _raised(lambda: comm.all_reduce((0, 1), x, about, algorithm).wait())


SUMS = (
    ("", "backend", True),
    ("", "direct", True),
    ("sums", "backend", True),
    ("sums", "direct", True),
    ("sums", "ring", True),
    ("", "backend", False),
    ("sums", "backend", False),
)


def test_sums_of_different_things_are_refused() -> None:
    for case, ranks in zip(SUMS, run_cases(_sum, 2, SUMS), strict=True):
        for sentence in ranks:
            assert "120,000 bytes of float32 for 'layer 0' (sum)" in sentence, case
            assert "120,000 bytes of float32 for 'layer 1' (sum)" in sentence, case


def _apart() -> str:
    comm = Communicator(timeout=20.0)
    comm.prepare([])
    parts, x = [torch.ones(3), torch.ones(3)], torch.ones(3)
    if comm.rank == 0:
        with comm.doing("state_dict"):
            about = About("conv1.weight")
            return _raised(lambda: comm.all_gather((0, 1), parts, x, about).wait())
    with comm.doing("the forward pass"):
        return _raised(lambda: comm.exchange([], [(0, x)], About("conv1>0")).wait())


def test_ranks_that_are_at_different_things_are_told_at_which() -> None:
    for sentence in run_local(_apart, 2):
        assert sentence == (
            "rank 0 is in state_dict ('conv1.weight'), and rank 1 in the forward pass ('conv1>0'); "
            "all ranks must do the same thing"
        )


def _groups() -> str:
    comm = Communicator(timeout=20.0)
    return _raised(lambda: comm.prepare([(0, 1), (1, 2)] if comm.rank else [(0, 1)]))


def test_ranks_that_prepare_different_groups_are_told_so() -> None:
    for sentence in run_local(_groups, 3):
        assert "makes groups of ranks" in sentence


# -- who may connect -------------------------------------------------------------------------------


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
    for greeting, line in (
        (token + connecting.WHO.pack(7, 1), (7, 1)),
        (bytes(16) + connecting.WHO.pack(7, 1), None),
        (token, None),
        (b"", None),
    ):
        with _called(greeting) as caller:
            assert connecting._greeting(caller, token, time.monotonic() + 5) == line
