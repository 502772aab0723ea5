"""Connections of our own between ranks, for messages that somebody is about to wait for.

Gloo hands every message to a thread, which hands it on to the one that waits: on busy cores that
takes ten times as long as a small message itself. Here whoever waits reads from the socket. Nobody
does while all compute, so large messages and the sums of gradients, which go on meanwhile, are none
of these. Ranks that cannot reach each other do without.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.groups import Members

MOST = 64  # ranks that are all connected with each other
LOOPBACK = "127.0.0.1"
PATIENCE = 5.0  # seconds to connect in
LARGEST = 1 << 20  # bytes of a message that sockets can take while all compute
BUFFER = 4 << 20  # bytes of a socket, if the system allows it
FORCED = 32, 33  # SO_SNDBUFFORCE and SO_RCVBUFFORCE: beyond the system's usual limit
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
Gather = Callable[[Any], list[Any]]  # every rank's value, in rank order


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
        self._complete: dict[Members, bool] = {}

    def join(self, members: Members) -> bool:
        """Whether all of these are connected with each other, and all of them know it."""
        if members not in self._complete:
            self._complete[members] = any(
                could and set(members) <= set(asked) for asked, could in self.asked.items()
            )
        return self._complete[members]

    def settle(self, members: Members, sockets: dict[int, socket.socket] | None) -> None:
        """Notes that these ranks have tried to connect, and the connections if all could."""
        self.asked[members] = sockets is not None
        self.known |= {peer: Wire(peer, made) for peer, made in (sockets or {}).items()}
        self._complete.clear()

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
        _close({member: wire.socket for member, wire in self.known.items()})
        self.known, self.asked, self._complete = {}, {}, {}


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


# -- connecting ------------------------------------------------------------------------------------


def connect(members: Members, me: int, gather: Gather) -> None:
    """Connects these ranks with each other, where all can reach all; each of them calls it."""
    own = wires()
    if members in own.asked or len(members) > MOST:
        return
    peers = set(members) - {me, *own.known}
    with socket.socket() as listener:
        offers = dict(zip(members, gather(_offer(listener)), strict=True))
        found = _connected(listener, me, peers, offers)
        everywhere = all(gather(found is not None))
    if not everywhere:
        _close(found)
        if me == members[0]:
            warnings.warn(
                "workers cannot connect to each other's ports; gloo carries all messages, of which "
                "small ones take longer",
                stacklevel=2,
            )
    own.settle(members, {p: _set_up(s) for p, s in (found or {}).items()} if everywhere else None)


def _offer(listener: socket.socket) -> dict[str, Any] | None:
    """Where this rank listens, on which machine; nothing where it cannot."""
    try:
        address = _address()
        listener.bind((address, 0))
        listener.listen(MOST)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None
    port = listener.getsockname()[1]
    return {"at": (address, port), "machine": machine, "token": secrets.token_bytes(16)}


def _address() -> str:
    """Of the interface that gloo was given, or of the one that leads to the first rank's host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if interface:
            asked = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), ADDRESS_OF_INTERFACE, asked)
            return socket.inet_ntoa(answer[20:24])
        master = os.environ.get("MASTER_ADDR")
        if master is None:
            return LOOPBACK
        probe.connect((master, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _connected(
    listener: socket.socket, me: int, peers: set[int], offers: dict[int, Any]
) -> dict[int, socket.socket] | None:
    """A connection to every peer: this rank calls those below it, and is called by the others."""
    if None in offers.values():
        return None
    machines = {offer["machine"] for offer in offers.values()}
    if len(machines) > 1 and any(offer["at"][0].startswith("127.") for offer in offers.values()):
        return None  # an address that leads nowhere from another machine
    token = next(iter(offers.values()))["token"]
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + PATIENCE
    try:
        for peer in sorted(peer for peer in peers if peer < me):
            found[peer] = socket.create_connection(offers[peer]["at"], _left(end))
            found[peer].sendall(token + struct.pack("!I", me))
        while found.keys() != peers:
            listener.settimeout(_left(end))
            caller, _ = listener.accept()
            peer = _greeting(caller, token, end)
            if peer in peers - found.keys():
                found[peer] = caller
            else:
                caller.close()  # a stranger
    except OSError:
        _close(found)
        return None
    return found


def _left(end: float) -> float:
    """Seconds until then; nobody waits longer, whatever strangers do."""
    if (seconds := end - time.monotonic()) <= 0:
        raise TimeoutError("there is no time left to connect")
    return seconds


def _greeting(caller: socket.socket, token: bytes, end: float) -> int | None:
    """The rank that calls; None if it does not know the token."""
    said, length = b"", len(token) + 4
    try:
        while len(said) < length:
            caller.settimeout(_left(end))
            if not (more := caller.recv(length - len(said))):
                return None
            said += more
    except OSError:
        return None
    known = secrets.compare_digest(said[:-4], token)
    return struct.unpack("!I", said[-4:])[0] if known else None


def _set_up(connection: socket.socket) -> socket.socket:
    """Messages leave at once, and the system keeps those that nobody reads yet."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in FORCED:
        with suppress(OSError):  # only for administrators; else the system finds a size itself
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    return connection


def _close(found: dict[int, socket.socket] | None) -> None:
    for connection in (found or {}).values():
        connection.close()
