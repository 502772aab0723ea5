"""Messages: how they start, while they are under way, and what is said if they do not arrive.

Headers go over our own connections, where ranks have these, whatever carries the message itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.comm.headers import SIZE, Mismatch, mismatch, purpose, tag_of
from shardwise.comm.wires import LARGEST, Parcel, memory_of
from shardwise.comm.world_state import world_state
from shardwise.errors import LostPeer, ShardwiseError
from shardwise.tensors import dtype_name

if TYPE_CHECKING:
    from shardwise.comm.ranks import Ranks

HOST_ONLY = ("gloo", "mpi4py")  # backends that move memory of the host only
EMPTY = memoryview(b"")
GRACE = 0.5  # seconds in which a rank whose connection is lost may have said why


@dataclass(frozen=True)
class About:
    """What a communication is for: in traces, in headers, and in the message when it fails."""

    name: str = "a tensor"
    kind: str = "transfer"  # or statistics, gradients, agreement


ANYTHING = About()
AGREEMENT = About("what all ranks must agree on", "agreement")


@dataclass(frozen=True, eq=False)
class Carried:
    """What torch carries, and the headers that announce it, where ranks are connected."""

    headers: Sequence[Any]
    work: Any
    timeout: float

    def wait(self) -> None:
        """Whatever differs from what was awaited is an error before it is used."""
        for one in self.headers:
            one.wait()
        self.work.wait(timedelta(seconds=self.timeout))

    def get_future(self) -> Any:
        return self.work.get_future()


class Pending:
    """Messages under way; `wait` returns when all buffers may be read and written."""

    def __init__(
        self,
        works: list[Any],
        finish: Callable[[], None] | None = None,
        talk: Communication | None = None,
    ) -> None:
        self._works, self._finish, self._talk = works, finish, talk
        if talk is not None and works:
            talk.watch(works)

    def wait(self) -> None:
        if self._works and self._talk is not None:
            self._talk.wait(self._works)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None

    def then(self, act: Callable[[], object]) -> Pending:
        """The same, and something that is done when these messages are there."""

        def finish() -> None:
            self.wait()
            act()

        return Pending([], finish)


class Communication:
    """One communication: who waits for whom, for what, and how long."""

    def __init__(self, comm: Ranks, action: str, peers: Iterable[int], about: About) -> None:
        self.world_state = world_state()
        self.world_state.alarm.check()
        self.comm, self.action, self.peers, self.about = comm, action, tuple(peers), about
        self._begin = self._landed = comm.timeline.now() if comm.timeline.on else 0.0

    @contextmanager
    def starting(self, peers: Iterable[int] | None = None) -> Iterator[None]:
        """Within, messages are started; that fails where a peer is known to be dead."""
        try:
            yield
        except (RuntimeError, ShardwiseError) as error:
            raise self.failed(error, self.peers if peers is None else peers) from None

    def watch(self, works: list[Any]) -> None:
        """Notes when the last message has arrived, whether or not anybody waits for it yet."""
        if self.comm.timeline.on:
            for work in works:
                future = getattr(work, "get_future", None)
                if future is not None:
                    with suppress(RuntimeError):  # not every kind of work has one
                        future().add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self._landed = max(self._landed, self.comm.timeline.now())

    def wait(self, works: list[Any]) -> None:
        if self.comm.timeline.on:
            self._recorded(works)
        else:
            self._wait(works)

    def _wait(self, works: list[Any]) -> None:
        for number, work in enumerate(works):
            try:
                work.wait()
            except (RuntimeError, ShardwiseError) as error:
                apart = len(works) == len(self.peers)  # a message each, or one work for all?
                peers = self.peers[number : number + 1] if apart else self.peers
                peers = getattr(error, "peers", peers)  # whom our own thread waited for
                raise self.failed(error, peers) from None

    def _recorded(self, works: list[Any]) -> None:
        timeline = self.comm.timeline
        before, start = timeline.switch(), timeline.now()
        self._wait(works)
        end = timeline.now()
        landed = self._landed if self._landed > self._begin else end
        lane = "gradients" if self.about.kind == "gradients" else "transfers"
        about = (self.about.name, self.about.kind, lane)
        timeline.add(*about, self._begin, min(landed, end), end - start)
        timeline.switch(*before)

    def failed(self, error: Exception, peers: Iterable[int]) -> ShardwiseError:
        """What to raise: what the rank that failed first has said, or else why this one fails."""
        comm, alarm = self.comm, self.world_state.alarm
        if told := alarm.heard(0.0 if isinstance(error, Mismatch) else GRACE):
            return LostPeer(told)
        if isinstance(error, Mismatch):
            comm.fail(str(error))
            return error
        sentence = self._complaint(error, comm.lost_by(error) or peers)
        comm.fail(sentence)
        return LostPeer(sentence)

    def _complaint(self, error: Exception, peers: Iterable[int]) -> str:
        """One sentence: who waited for whom, and in what."""
        comm = self.comm
        others = [str(comm.global_rank(peer)) for peer in dict.fromkeys(peers) if peer != comm.rank]
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
        return (
            f"rank {comm.global_rank(comm.rank)} waited in vain for "
            f"{ranks if others else 'the others'} in the {self.action} of {self.about.name}: "
            f"{_reason(error)}"
        )


def _reason(error: Exception) -> str:
    """The first sentence of an error, without the place in gloo's source that it begins with."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", str(error).strip())
    return re.split(r"\n|\. ", text)[0] or "the connection was lost"


# -- starting: over our own connections where that is quicker, else by torch -----------------------


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
