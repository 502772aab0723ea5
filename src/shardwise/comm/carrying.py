"""Starting messages: over our own connections where that is quicker, else by torch.

Either way their headers go over our own connections, where ranks have these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.comm.headers import SIZE, mismatch, purpose, tag_of
from shardwise.comm.pending import About, Carried, Communication
from shardwise.comm.wires import LARGEST, Parcel, memory_of
from shardwise.comm.world_state import world_state
from shardwise.tensors import dtype_name

if TYPE_CHECKING:
    from shardwise.comm.ranks import Ranks

HOST_ONLY = ("gloo", "mpi4py")  # backends that move memory of the host only
EMPTY = memoryview(b"")


def message(talk: Communication, peer: int, x: torch.Tensor, leaves: bool, group: Any) -> Any:
    """Starts a message to a rank, or awaits one from it."""
    comm, member = talk.comm, talk.comm.global_rank(peer)
    with talk.starting((peer,)):
        connected, inside = _ways(comm, (comm.rank, peer), x, talk.about)
        if inside:
            return _parcel(talk, member, leaves, x.nbytes, x.dtype, memory_of(x))
        if connected:
            notes = [_parcel(talk, member, leaves, x.nbytes, x.dtype)]
            tag = tag_of(notes[0].header)
        else:
            notes, tag = [], tag_for(talk, member, x, leaves)
        start = dist.isend if leaves else dist.irecv
        return Carried(notes, start(x, member, group, tag), comm.timeout)


def swap(talk: Communication, x: torch.Tensor, arrived: torch.Tensor) -> list[Parcel]:
    """Sends one tensor to all peers, and awaits one like it from each, a row each."""
    mine, rows, size, parcels = memory_of(x), memory_of(arrived), x.nbytes, []
    for place, peer in enumerate(talk.peers):
        row = rows[place * size : (place + 1) * size]
        for leaves, content in ((False, row), (True, mine)):
            member = talk.comm.global_rank(peer)
            parcels.append(_parcel(talk, member, leaves, size, x.dtype, content))
    return parcels


def wired(comm: Ranks, ranks: tuple[int, ...], x: torch.Tensor, about: About) -> bool:
    """Whether such messages go over our own connections; the same on all of these ranks."""
    return _ways(comm, ranks, x, about)[1]


def _ways(comm: Ranks, ranks: tuple[int, ...], x: torch.Tensor, about: About) -> tuple[bool, bool]:
    """Whether these ranks are connected, and whether such a message goes that way itself."""
    connected = comm.backend == "gloo" and world_state().wires.connected(comm.members(ranks))
    aside = comm.lane or about.kind == "gradients"  # goes on while all compute
    return connected, connected and not aside and x.nbytes <= LARGEST


def _parcel(
    talk: Communication,
    member: int,
    leaves: bool,
    nbytes: int,
    dtype: torch.dtype | None,
    content: memoryview | None = None,
) -> Parcel:
    """A message over our own connections; without content, the header of one that torch carries."""
    now, comm = talk.world_state, talk.comm
    follows = content is not None
    said = now.header(member, comm.lane, leaves, nbytes, follows, _text(talk, dtype))
    move = now.wires.send if leaves else now.wires.receive
    return move(member, said, content if content is not None else EMPTY, comm.timeout)


def _text(talk: Communication, dtype: torch.dtype | None) -> bytes:
    name = dtype_name(dtype) if dtype is not None else ""
    return purpose(name, talk.action, talk.world_state.phase, talk.about.name)


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
    comm, members, me = talk.comm, talk.comm.members(ranks), talk.comm.global_rank(talk.comm.rank)
    out = [x.nbytes for x in sends] or [0] * len(ranks)
    into = [x.nbytes for x in receives] or [0] * len(ranks)
    if comm.backend == "gloo" and talk.world_state.wires.connected(members):
        return [
            _parcel(talk, member, leaves, nbytes, dtype)
            for member, sent, awaited in zip(members, out, into, strict=True)
            if member != me
            for leaves, nbytes in ((True, sent), (False, awaited))
        ]
    if comm.backend not in HOST_ONLY:
        return []
    nbytes = out[0] if len({*out, *into}) == 1 else 0
    said = talk.world_state.header(members, comm.lane, True, nbytes, False, _text(talk, dtype))
    everyone = [torch.empty(SIZE, dtype=torch.uint8) for _ in ranks]
    mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    work = dist.all_gather(everyone, mine, group, async_op=True)
    return [_Headers(comm, ranks, said, everyone, work)]


def compare(announced: list[Any]) -> list[Any]:
    """Returns when all ranks are known to take part in the same; nothing is left to wait for."""
    for one in announced:
        one.wait()
    return []


@dataclass(frozen=True, eq=False)
class _Headers:
    """Every rank's header for a collective, gathered by the backend: ranks are not connected."""

    comm: Ranks
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


def tag_for(talk: Communication, whom: object, x: torch.Tensor, leaves: bool = True) -> int:
    """For messages without headers: with one rank, or of a sum that several start alike."""
    lane, text = talk.comm.lane, _text(talk, x.dtype)
    return tag_of(talk.world_state.header(whom, lane, leaves, x.nbytes, False, text))
