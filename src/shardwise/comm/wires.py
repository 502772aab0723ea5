"""Connections of our own between ranks, for messages that somebody is about to wait for.

Gloo hands every message to a thread, which hands it on to the one that waits: on busy cores that
takes ten times as long as a small message itself. Here whoever waits reads from the socket. Nobody
does while all compute, so the sums of gradients, which go on meanwhile, are none of these. Ranks
that cannot reach each other do without.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.groups import Members

MOST = 64  # ranks that are all connected with each other
LOOPBACK = "127.0.0.1"
PATIENCE = 5.0  # seconds to connect in
BUFFER = 4 << 20  # bytes that a socket takes while its peer computes, if the system allows it
FORCED = {socket.SO_SNDBUF: 32, socket.SO_RCVBUF: 33}  # the same beyond the system's limit
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
Gather = Callable[[Any], list[Any]]  # every rank's value, in rank order


class Cut(RuntimeError):
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
            raise Cut(self.member, error.strerror or str(error)) from None


class Wires:
    """The connections of this process, by global rank."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.known: dict[int, Wire] = {}
        self.asked: set[Members] = set()  # who tried to connect, whether or not they could
        self.timeout: float | None = None

    def send(self, member: int, tensor: torch.Tensor) -> Parcel:
        wire = self.known[member]
        parcel = Parcel(self, wire, _bytes(tensor))
        wire.outgoing.append(parcel)
        wire.push()
        return parcel

    def receive(self, member: int, tensor: torch.Tensor) -> Parcel:
        wire = self.known[member]
        parcel = Parcel(self, wire, _bytes(tensor))
        wire.awaited.append(parcel)
        return parcel

    def swap(self, members: Sequence[int], x: torch.Tensor, arrived: torch.Tensor) -> list[Parcel]:
        """Sends one tensor to several, and awaits one of the same size from each, a row each."""
        mine, rows = _bytes(x), _bytes(arrived)
        parcels = []
        for place, member in enumerate(members):
            wire = self.known[member]
            row = rows[place * len(mine) : (place + 1) * len(mine)]
            wire.awaited.append(Parcel(self, wire, row))
            wire.outgoing.append(Parcel(self, wire, mine))
            parcels += [wire.awaited[-1], wire.outgoing[-1]]
            wire.push()
        return parcels

    def work_until(self, parcel: Parcel) -> None:
        """Moves whatever can be moved until this one has been."""
        if parcel.left:
            parcel.wire.pull()
        end = None if self.timeout is None else time.monotonic() + self.timeout
        while parcel.left:
            self._work(parcel, None if end is None else end - time.monotonic())

    def _work(self, parcel: Parcel, seconds: float | None) -> None:
        """Sleeps until something moves, and moves it."""
        poll = select.poll()
        busy = {wire.socket.fileno(): wire for wire in self.known.values() if wire.events}
        for number, wire in busy.items():
            poll.register(number, wire.events)
        ready = poll.poll(None if seconds is None else max(0.0, 1e3 * seconds))
        if not ready:
            raise Cut(parcel.wire.member, "timed out")
        for number, _ in ready:
            busy[number].pull()
            busy[number].push()

    def close(self) -> None:
        _close({member: wire.socket for member, wire in self.known.items()})
        self.known = {}


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which stays alive as long as this."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


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


def connect(members: Members, me: int, gather: Gather, timeout: float | None) -> None:
    """Connects these ranks with each other, where all can reach all; each of them calls it."""
    own = wires()
    if members in own.asked or len(members) > MOST:
        return
    own.asked.add(members)
    own.timeout = timeout
    peers = set(members) - {me, *own.known}
    with socket.socket() as listener:
        offers = dict(zip(members, gather(_offer(listener)), strict=True))
        found = _connected(listener, me, peers, offers)
        everywhere = all(gather(found is not None))
    if everywhere and found is not None:
        own.known |= {peer: Wire(peer, _set_up(made)) for peer, made in found.items()}
    else:
        _close(found)


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
    try:
        for peer in sorted(peer for peer in peers if peer < me):
            found[peer] = socket.create_connection(offers[peer]["at"], PATIENCE)
            found[peer].sendall(token + struct.pack("!I", me))
        listener.settimeout(PATIENCE)
        while found.keys() != peers:
            caller, _ = listener.accept()
            peer = _greeting(caller, token)
            if peer in peers - found.keys():
                found[peer] = caller
            else:
                caller.close()  # a stranger
    except OSError:
        _close(found)
        return None
    return found


def _greeting(caller: socket.socket, token: bytes) -> int | None:
    """The rank that calls; None if it does not know the token."""
    caller.settimeout(PATIENCE)
    said = b""
    try:
        while len(said) < len(token) + 4 and (more := caller.recv(len(token) + 4 - len(said))):
            said += more
    except OSError:
        return None
    if len(said) < len(token) + 4 or not secrets.compare_digest(said[:-4], token):
        return None
    return struct.unpack("!I", said[-4:])[0]


def _set_up(connection: socket.socket) -> socket.socket:
    """Messages leave at once, and the system keeps those that nobody reads yet."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, forced in FORCED.items():
        try:
            connection.setsockopt(socket.SOL_SOCKET, forced, BUFFER)
        except OSError:  # only for administrators
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    return connection


def _close(found: dict[int, socket.socket] | None) -> None:
    for connection in (found or {}).values():
        connection.close()
