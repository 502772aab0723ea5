"""Connections of our own between ranks, for messages that somebody is about to wait for.

Gloo hands every message to a thread, which hands it on to the one that waits: on busy cores that
takes ten times as long as a small message itself. Here whoever waits reads from the socket. Nobody
does while all compute, so large messages and the sums of gradients, which go on meanwhile, are none
of these: torch carries them, and only their headers come this way. Ranks that cannot reach each
other do without.
"""

from __future__ import annotations

import ctypes
import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from shardwise.comm.alarm import Alarm
from shardwise.comm.headers import SIZE, Mismatch, follows, lane_of, mismatch

Members = tuple[int, ...]  # global ranks

LARGEST = 1 << 20  # bytes of a message that sockets can take while all compute
COPIED = 64 << 10  # bytes that are copied behind their header rather than sent after it
INBOX = 64 << 10  # bytes that are read ahead


class LostConnection(RuntimeError):
    """A connection that was lost, and the global rank at its other end."""

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(reason)
        self.member = member


@dataclass(eq=False, slots=True)
class Parcel:
    """One message on its way, in or out, or the header of one that torch carries."""

    wires: Wires
    wire: Wire
    header: bytes
    left: memoryview  # what has not gone, or come, yet
    timeout: float
    over: bool = False

    def wait(self) -> None:
        """Returns when all of it has left, or is here."""
        if not self.over:
            self.wires.work_until(self)


class Wire:
    """One connection: what is to leave and what is awaited, each in the order it was started."""

    def __init__(self, me: int, member: int, connection: socket.socket) -> None:
        self.me, self.member, self.socket = me, member, connection
        self.broken: Exception | None = None  # why nothing can be said about what comes next
        self.outgoing: deque[Parcel] = deque()
        self.num_awaited = 0
        self._awaited: dict[int, deque[Parcel]] = defaultdict(deque)  # by lane
        self._early: dict[int, deque[bytes]] = defaultdict(deque)  # headers nobody asked for yet
        self._open: Parcel | None = None  # the message of which the rest is coming
        self._inbox = Inbox(self._read)

    @property
    def events(self) -> int:
        """What to look out for."""
        return (select.POLLOUT if self.outgoing else 0) | (select.POLLIN if self.num_awaited else 0)

    def push(self) -> None:
        """Sends as much as the socket takes."""
        while self.outgoing:
            parcel = self.outgoing[0]
            sent = self._try(self.socket.send, parcel.left)
            if not sent:
                return
            parcel.left = parcel.left[sent:]
            if not parcel.left:
                self.outgoing.popleft().over = True

    def pull(self) -> None:
        """Reads as much as has come of what is awaited."""
        while self.num_awaited:
            if self._open is None:
                said = self._inbox.take(SIZE)
                if not said:
                    return
                self._open = self._opened(said)
            elif count := self._inbox.move(self._open.left):
                self._open.left = self._open.left[count:]
            else:
                return
            if self._open is not None and not self._open.left:
                self._open.over, self._open = True, None
                self.num_awaited -= 1

    def meet(self, parcel: Parcel) -> None:
        """Awaits a message, whose header may be here already."""
        lane = lane_of(parcel.header)
        if self._early[lane]:
            self._compare(self._early[lane].popleft(), parcel)
            parcel.over = True
        else:
            self._awaited[lane].append(parcel)
            self.num_awaited += 1

    def _opened(self, said: bytes) -> Parcel | None:
        """The message that a header belongs to; None where nobody has asked for it yet."""
        lane = lane_of(said)
        if self._awaited[lane]:
            parcel = self._awaited[lane].popleft()
            self._compare(said, parcel)
            return parcel
        if follows(said):  # all ranks start their messages in the same order: not this one
            raise self._wrong(said, next(queue[0] for queue in self._awaited.values() if queue))
        self._early[lane].append(said)
        return None

    def _compare(self, said: bytes, parcel: Parcel) -> None:
        if said != parcel.header:
            raise self._wrong(said, parcel)

    def _wrong(self, said: bytes, parcel: Parcel) -> Mismatch:
        self.broken = mismatch(self.member, said, self.me, parcel.header)
        return self.broken

    def _read(self, into: memoryview) -> int:
        """How many bytes have come; none: no more for now."""
        count = self._try(self.socket.recv_into, into)
        if count == 0:
            raise self.lost("the connection was closed by its peer")
        return count or 0

    def _try(self, move: Callable[[memoryview], int], content: memoryview) -> int | None:
        """How many bytes the socket gives or takes; None: not now."""
        if self.broken is not None:
            raise self.broken
        try:
            return move(content)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self.lost(error.strerror or str(error)) from None

    def lost(self, reason: str) -> LostConnection:
        self.broken = LostConnection(self.member, reason)
        return self.broken


class Inbox:
    """What a socket has given and nobody has taken: a small message is one call, header and all."""

    def __init__(self, read: Callable[[memoryview], int]) -> None:
        self._read, self._memory = read, memoryview(bytearray(INBOX))
        self._start = self._stop = 0

    def take(self, count: int) -> bytes:
        """So many bytes, or none while they are not all here."""
        if self._stop - self._start < count and self._fill() < count:
            return b""
        self._start += count
        return self._memory[self._start - count : self._start].tobytes()

    def move(self, into: memoryview) -> int:
        """Moves what is here; what is large goes straight to its place."""
        if self._start == self._stop and len(into) >= INBOX:
            return self._read(into)
        if self._start == self._stop:
            self._fill()
        count = min(self._stop - self._start, len(into))
        into[:count] = self._memory[self._start : self._start + count]
        self._start += count
        return count

    def _fill(self) -> int:
        """Reads more behind what is here; how much is here then."""
        held = self._stop - self._start
        self._memory[:held] = self._memory[self._start : self._stop]
        self._start, self._stop = 0, held
        self._stop += self._read(self._memory[held:])
        return self._stop


class Wires:
    """The connections of this process, by global rank."""

    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm
        self.known: dict[int, Wire] = {}
        self.asked: dict[Members, bool] = {}  # who tried to connect, and whether all could
        self._answers: dict[Members, bool] = {}  # worked out once: every message asks

    def connected(self, members: Members) -> bool:
        """Whether all of these are connected with each other, and all of them know it."""
        if members not in self._answers:
            self._answers[members] = any(
                could and set(members) <= set(asked) for asked, could in self.asked.items()
            )
        return self._answers[members]

    def settle(self, members: Members, me: int, sockets: dict[int, socket.socket] | None) -> None:
        """Notes that these ranks have tried to connect, and the connections if all could."""
        self.asked[members] = sockets is not None
        self.known |= {peer: Wire(me, peer, made) for peer, made in (sockets or {}).items()}
        self._answers.clear()

    def send(self, member: int, header: bytes, content: memoryview, timeout: float) -> Parcel:
        """Sends a message, or (without content) the header of one that torch carries."""
        wire = self.known[member]
        pieces = (header, content) if len(content) > COPIED else (header + content,)
        for piece in pieces:
            wire.outgoing.append(Parcel(self, wire, header, memoryview(piece), timeout))
        last = wire.outgoing[-1]
        wire.push()
        return last

    def receive(self, member: int, header: bytes, into: memoryview, timeout: float) -> Parcel:
        """Awaits a message, or (without room for it) the header of one that torch carries."""
        wire = self.known[member]
        parcel = Parcel(self, wire, header, into, timeout)
        wire.meet(parcel)
        return parcel

    def work_until(self, parcel: Parcel) -> None:
        """Moves whatever can be moved until this one has been."""
        parcel.wire.pull()
        end = time.monotonic() + parcel.timeout
        while not parcel.over:
            self._work(max(min(end - time.monotonic(), 1.0), 0.0))
            if not parcel.over and time.monotonic() > end:
                raise parcel.wire.lost("timed out")

    def _work(self, seconds: float) -> None:
        """Sleeps until something moves, for so long at most, and moves it."""
        poll = select.poll()
        busy = {wire.socket.fileno(): wire for wire in self.known.values() if wire.events}
        for number, wire in busy.items():
            poll.register(number, wire.events)
        poll.register(self.alarm.bell, select.POLLIN)
        ready = poll.poll(1000 * seconds)
        self.alarm.check()
        for number, _ in ready:
            busy[number].pull()
            busy[number].push()

    def close(self) -> None:
        for wire in self.known.values():
            wire.socket.close()
        self.known, self.asked, self._answers = {}, {}, {}


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which stays alive as long as this."""
    assert tensor.is_contiguous() and not tensor.is_cuda, "messages lie in one piece, on the host"
    array = _bytes(tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")  # a tenth of the time that numpy takes


@lru_cache(maxsize=1024)
def _bytes(count: int) -> type[ctypes.Array]:
    return ctypes.c_ubyte * count
