"""Connections of our own between ranks, for small sums that everybody waits for.

Gloo hands every message to a thread, which hands it on to the one that waits: on busy cores that
takes ten times as long as a small message itself. Here whoever needs a sum reads it from the
socket. Ranks that cannot reach each other do without.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from shardwise.comm.groups import Members
from shardwise.comm.summing import Interrupted

LOOPBACK = "127.0.0.1"
PATIENCE = 5.0  # seconds to connect in
BUFFER = 1 << 18  # bytes of a socket: several messages of a sum fit, so that nobody waits to send
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
Gather = Callable[[Any], list[Any]]  # every rank's value, in rank order


class Wires:
    """The connections of this process, by global rank, and the groups that are complete."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.sockets: dict[int, socket.socket] = {}
        self.groups: set[Members] = set()
        self.works = True  # until somebody could not be reached

    def sum(self, at: Mapping[int, int], own: int, x: np.ndarray) -> None:
        """Replaces x by its sum over ranks, in their order, so that all get the same bits.

        `at` has the global rank of each; `own` is this one.
        """
        others = [rank for rank in at if rank != own]
        parts = {rank: x if rank == own else np.empty_like(x) for rank in at}
        for rank in others:
            with _talking_to(rank):
                self.sockets[at[rank]].sendall(x)
        for rank in others:
            with _talking_to(rank):
                _receive(self.sockets[at[rank]], parts[rank])
        x[...] = reduce(np.add, parts.values())

    def close(self) -> None:
        _close(self.sockets)
        self.sockets, self.groups = {}, set()


@contextmanager
def _talking_to(rank: int) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:  # the limit that the socket was given
        raise Interrupted(rank, "timed out") from None
    except OSError as error:
        raise Interrupted(rank, error.strerror or str(error)) from None


_wires: Wires | None = None


def wires() -> Wires:
    """Those of the present world: the ones of a world that has ended are closed."""
    global _wires
    if _wires is None or _wires.world is not dist.group.WORLD:
        if _wires is not None:
            _wires.close()
        _wires = Wires()
    return _wires


def connect(
    groups: Iterable[Members], rank: int, ranks: Members, gather: Gather, timeout: float | None
) -> None:
    """Connects the members of every group with each other; all these ranks call it alike.

    Where one of them cannot reach another, none has a connection from now on.
    """
    own = wires()
    missing = [members for members in groups if members not in own.groups]
    if not missing:
        return
    peers = {peer for members in missing if rank in members for peer in members}
    peers -= {rank, *own.sockets}
    with socket.socket() as listener:
        offers = gather(_offer(listener) if own.works else None)
        found = _connected(listener, rank, peers, dict(zip(ranks, offers, strict=True)))
        own.works = all(gather(found is not None))
    if own.works:
        own.sockets |= {peer: _set_up(made, timeout) for peer, made in found.items()}
        own.groups |= set(missing)
    else:
        _close(found)


def _offer(listener: socket.socket) -> dict[str, Any] | None:
    """Where this rank listens, on which machine; nothing where it cannot."""
    try:
        address = _address()
        listener.bind((address, 0))
        listener.listen(128)
        machine = f"{_text('/proc/sys/kernel/random/boot_id')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None
    port = listener.getsockname()[1]
    return {"at": (address, port), "machine": machine, "token": secrets.token_bytes(16)}


def _text(path: str) -> str:
    return Path(path).read_text().strip()


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
    listener: socket.socket, rank: int, peers: set[int], offers: dict[int, Any]
) -> dict[int, socket.socket] | None:
    """A connection to every peer: this rank calls those below it, and is called by the others."""
    if None in offers.values():
        return None
    hosts = {offer["machine"] for offer in offers.values()}
    if len(hosts) > 1 and any(offer["at"][0].startswith("127.") for offer in offers.values()):
        return None  # an address that leads nowhere from another host
    token = next(iter(offers.values()))["token"]
    found: dict[int, socket.socket] = {}
    try:
        for peer in sorted(peer for peer in peers if peer < rank):
            found[peer] = socket.create_connection(offers[peer]["at"], PATIENCE)
            found[peer].sendall(token + struct.pack("!I", rank))
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
    said = np.zeros(len(token) + 4, dtype=np.uint8)
    try:
        _receive(caller, said)
    except OSError:
        return None
    text = said.tobytes()
    known = secrets.compare_digest(text[:-4], token)
    return struct.unpack("!I", text[-4:])[0] if known else None


def _close(found: dict[int, socket.socket] | None) -> None:
    for connection in (found or {}).values():
        connection.close()


def _set_up(connection: socket.socket, timeout: float | None) -> socket.socket:
    """Messages leave at once; reading blocks for as long as a group of torch's would."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", int(timeout or 0), int((timeout or 0) % 1 * 1e6))  # 0: for ever
    for option, value in (
        (socket.SO_RCVTIMEO, limit),
        (socket.SO_SNDTIMEO, limit),
        (socket.SO_RCVBUF, BUFFER),
        (socket.SO_SNDBUF, BUFFER),
    ):
        connection.setsockopt(socket.SOL_SOCKET, option, value)
    return connection


def _receive(connection: socket.socket, into: np.ndarray) -> None:
    left = memoryview(into.reshape(-1).view(np.uint8))
    while len(left):
        count = connection.recv_into(left, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the connection was closed by its peer")
        left = left[count:]
