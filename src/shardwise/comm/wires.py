"""Connections of our own between ranks, for messages that somebody is about to wait for.

Gloo hands every message to a thread, which hands it on to the one that waits: on busy cores that
takes ten times as long as a small message itself. Here whoever waits reads from the socket. Nobody
does while all compute, so large messages and the sums of gradients, which go on meanwhile, are none
of these. Ranks that cannot reach each other do without.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch
import torch.distributed as dist

from shardwise.comm.groups import Members

LARGEST = 1 << 20  # bytes of a message that sockets can take while all compute


class Lost(RuntimeError):
    """A connection that was lost, and the global rank at its other end."""

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(reason)
        self.member = member


@dataclass(eq=False)
class Parcel:
    """One message on its way, in or out."""

    wires: Wires
    wire: Wire
    left: memoryview  # what has not gone yet
    timeout: float | None

    def wait(self) -> None:
        """Returns when all of it has left, or is here."""
        self.wires.work_until(self)


@dataclass(eq=False)
class Wire:
    """One connection: what is to leave and what is awaited, each in the order it was started."""

    member: int
    socket: socket.socket
    outgoing: deque[Parcel] = field(default_factory=deque)
    awaited: deque[Parcel] = field(default_factory=deque)
    broken: str = ""  # why nothing can be said about what comes next

    @property
    def events(self) -> int:
        """What to look out for."""
        return (select.POLLOUT if self.outgoing else 0) | (select.POLLIN if self.awaited else 0)

    def push(self) -> None:
        """Sends as much as the socket takes."""
        self._move(self.outgoing, self.socket.send)

    def pull(self) -> None:
        """Reads as much as has come of what is awaited."""
        self._move(self.awaited, self.socket.recv_into)

    def _move(self, parcels: deque[Parcel], move: Callable[[memoryview], int]) -> None:
        if self.broken:
            raise Lost(self.member, self.broken)
        try:
            while parcels:
                parcel = parcels[0]
                while parcel.left:
                    count = move(parcel.left)
                    if not count:
                        raise ConnectionError("the connection was closed by its peer")
                    parcel.left = parcel.left[count:]
                parcels.popleft()
        except BlockingIOError:  # no more for now
            pass
        except OSError as error:
            raise self.lost(error.strerror or str(error)) from None

    def lost(self, reason: str) -> Lost:
        self.broken = reason
        return Lost(self.member, reason)


class Wires:
    """The connections of this process, by global rank."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
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

    def settle(self, members: Members, sockets: dict[int, socket.socket] | None) -> None:
        """Notes that these ranks have tried to connect, and the connections if all could."""
        self.asked[members] = sockets is not None
        self.known |= {peer: Wire(peer, made) for peer, made in (sockets or {}).items()}
        self._answers.clear()

    def send(self, member: int, tensor: torch.Tensor, timeout: float | None) -> Parcel:
        wire = self.known[member]
        parcel = Parcel(self, wire, _bytes(tensor), timeout)
        wire.outgoing.append(parcel)
        wire.push()
        return parcel

    def receive(self, member: int, tensor: torch.Tensor, timeout: float | None) -> Parcel:
        wire = self.known[member]
        parcel = Parcel(self, wire, _bytes(tensor), timeout)
        wire.awaited.append(parcel)
        return parcel

    def swap(
        self, members: Members, x: torch.Tensor, arrived: torch.Tensor, timeout: float | None
    ) -> list[Parcel]:
        """Sends one tensor to several, and awaits one of the same size from each, a row each."""
        mine, rows, parcels = _bytes(x), _bytes(arrived), []
        for place, member in enumerate(members):
            wire = self.known[member]
            row = rows[place * len(mine) : (place + 1) * len(mine)]
            theirs, own = Parcel(self, wire, row, timeout), Parcel(self, wire, mine, timeout)
            wire.awaited.append(theirs)
            wire.outgoing.append(own)
            wire.push()
            parcels += [theirs, own]
        return parcels

    def work_until(self, parcel: Parcel) -> None:
        """Moves whatever can be moved until this one has been."""
        if parcel.left:
            parcel.wire.pull()
        end = time.monotonic() + parcel.timeout if parcel.timeout else inf
        while parcel.left:
            self._work()
            if parcel.left and time.monotonic() > end:
                raise parcel.wire.lost("timed out")

    def _work(self) -> None:
        """Sleeps until something moves, for a second at most, and moves it."""
        poll = select.poll()
        busy = {wire.socket.fileno(): wire for wire in self.known.values() if wire.events}
        for number, wire in busy.items():
            poll.register(number, wire.events)
        for number, _ in poll.poll(1000):
            busy[number].pull()
            busy[number].push()

    def close(self) -> None:
        for wire in self.known.values():
            wire.socket.close()
        self.known, self.asked, self._answers = {}, {}, {}


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which stays alive as long as this."""
    assert tensor.is_contiguous(), "messages lie in one piece"
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # of one element, strides may be odd
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


_wires: Wires | None = None


def wires() -> Wires:
    """Those of the present world: the ones of a world that has ended are closed."""
    global _wires
    if _wires is None or _wires.world is not dist.group.WORLD:
        if _wires is not None:
            _wires.close()
        _wires = Wires()
    return _wires
