"""Starting messages: over our own connections where that is quicker, else by torch.

Either way their headers go over our own connections, where ranks have these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.headers import SIZE, lane_number, mismatch, purpose, tag_of
from shardwise.comm.pending import Carried, Communication
from shardwise.comm.wires import LARGEST, Parcel, memory_of

HOST_ONLY = ("gloo", "mpi4py")  # backends that move memory of the host only
EMPTY = memoryview(b"")


def send(talk: Communication, peer: int, x: torch.Tensor, group: Any) -> Any:
    """Starts a message to a rank."""
    comm, wires = talk.comm, talk.world_state.wires
    member = comm.global_rank(peer)
    with talk.starting((peer,)):
        connected, inside = _ways(talk, (comm.rank, peer), x)
        said = _header(talk, member, True, x, inside)
        if inside:
            return wires.send(member, said, memory_of(x), comm.timeout)
        notes = [wires.send(member, said, EMPTY, comm.timeout)] if connected else []
        return Carried(notes, dist.isend(x, member, group, tag_of(said)), comm.timeout)


def receive(talk: Communication, peer: int, buffer: torch.Tensor, group: Any) -> Any:
    """Awaits a message from a rank."""
    comm, wires = talk.comm, talk.world_state.wires
    member = comm.global_rank(peer)
    with talk.starting((peer,)):
        connected, inside = _ways(talk, (comm.rank, peer), buffer)
        said, lane = _header(talk, member, False, buffer, inside), lane_number(comm.lane)
        if inside:
            return wires.receive(member, lane, said, memory_of(buffer), comm.timeout)
        notes = [wires.receive(member, lane, said, EMPTY, comm.timeout)] if connected else []
        return Carried(notes, dist.irecv(buffer, member, group, tag_of(said)), comm.timeout)


def swap(talk: Communication, x: torch.Tensor, arrived: torch.Tensor) -> list[Parcel]:
    """Sends one tensor to all peers, and awaits one like it from each, a row each."""
    comm, now, parcels = talk.comm, talk.world_state, []
    lane, timeout, text = comm.lane, comm.timeout, _text(talk, x.dtype)
    mine, rows, size = memory_of(x), memory_of(arrived), _nbytes(x)
    for place, peer in enumerate(talk.peers):
        member, row = comm.global_rank(peer), rows[place * size : (place + 1) * size]
        awaited = now.header(member, lane, False, size, True, text)
        parcels.append(now.wires.receive(member, lane_number(lane), awaited, row, timeout))
        said = now.header(member, lane, True, size, True, text)
        parcels.append(now.wires.send(member, said, mine, timeout))
    return parcels


def wired(talk: Communication, ranks: tuple[int, ...], x: torch.Tensor) -> bool:
    """Whether such messages go over our own connections; the same on all of these ranks."""
    return _ways(talk, ranks, x)[1]


def _ways(talk: Communication, ranks: tuple[int, ...], x: torch.Tensor) -> tuple[bool, bool]:
    """Whether these ranks are connected, and whether such a message goes that way itself."""
    comm = talk.comm
    connected = comm.backend == "gloo" and talk.world_state.wires.connected(comm.members(ranks))
    aside = comm.lane or talk.about.kind == "gradients"  # goes on while all compute
    return connected, connected and not aside and _nbytes(x) <= LARGEST


def _header(
    talk: Communication, whom: object, outgoing: bool, x: torch.Tensor, follows: bool
) -> bytes:
    text = _text(talk, x.dtype)
    return talk.world_state.header(whom, talk.comm.lane, outgoing, _nbytes(x), follows, text)


def _text(talk: Communication, dtype: torch.dtype | None) -> bytes:
    return purpose(
        _name(dtype),
        talk.action,
        talk.world_state.phase,
        talk.about.name,
    )


@lru_cache
def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.") if dtype is not None else ""


def _nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


# -- collectives of the backend --------------------------------------------------------------------


def announce(
    talk: Communication,
    ranks: tuple[int, ...],
    group: Any,
    dtype: torch.dtype | None = None,
    sends: Sequence[torch.Tensor] = (),
    receives: Sequence[torch.Tensor] = (),
) -> list[Any]:
    """Tells all ranks of a collective what this one takes part in; `compare` waits for theirs.

    With what goes to and comes from each of the ranks, where that is known. Collectives of gloo
    that differ from each other end a process, or give wrong numbers.
    """
    comm, text, members = (
        talk.comm,
        _text(talk, dtype),
        talk.comm.members(ranks),
    )
    out = [_nbytes(x) for x in sends] or [0] * len(ranks)
    into = [_nbytes(x) for x in receives] or [0] * len(ranks)
    if comm.backend == "gloo" and talk.world_state.wires.connected(members):
        others = [
            m for m in zip(members, out, into, strict=True) if m[0] != comm.global_rank(comm.rank)
        ]
        return [parcel for other in others for parcel in _notes(talk, text, *other)]
    if comm.backend not in HOST_ONLY:
        return []
    nbytes = out[0] if len({*out, *into}) == 1 else 0
    said = talk.world_state.header(members, comm.lane, True, nbytes, False, text)
    everyone = [torch.empty(SIZE, dtype=torch.uint8) for _ in ranks]
    mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    work = dist.all_gather(everyone, mine, group, async_op=True)
    return [_Headers(comm, ranks, said, everyone, work)]


def compare(announced: list[Any]) -> list[Any]:
    """Returns when all ranks are known to take part in the same; nothing is left to wait for."""
    for one in announced:
        one.wait()
    return []


def _notes(talk: Communication, text: bytes, member: int, out: int, into: int) -> list[Parcel]:
    """A header to a rank, and one from it."""
    comm, wires = talk.comm, talk.world_state.wires
    said = talk.world_state.header(member, comm.lane, True, out, False, text)
    awaited = talk.world_state.header(member, comm.lane, False, into, False, text)
    return [
        wires.send(member, said, EMPTY, comm.timeout),
        wires.receive(member, lane_number(comm.lane), awaited, EMPTY, comm.timeout),
    ]


@dataclass(frozen=True, eq=False)
class _Headers:
    """Every rank's header for a collective, gathered by the backend: ranks are not connected."""

    comm: Any
    ranks: tuple[int, ...]
    mine: bytes
    everyone: list[torch.Tensor]
    work: Any

    def wait(self) -> None:
        self.work.wait(timedelta(seconds=self.comm.timeout))
        for rank, one in zip(self.ranks, self.everyone, strict=True):
            if (said := one.numpy().tobytes()) != self.mine:
                me = self.comm.global_rank(self.comm.rank)
                raise mismatch(self.comm.global_rank(rank), said, me, self.mine)


def tag_for(talk: Communication, ranks: tuple[int, ...], x: torch.Tensor) -> int:
    """For the messages of one sum, which several ranks start in the same order."""
    return tag_of(_header(talk, talk.comm.members(ranks), True, x, False))
