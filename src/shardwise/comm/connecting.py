"""Connecting ranks with each other: who listens where, and who is let in."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.comm.wires import Members
from shardwise.comm.world_state import world_state

MOST = 64  # ranks that are all connected with each other
LOOPBACK = "127.0.0.1"
PATIENCE = 5.0  # seconds to connect in
BUFFER = 4 << 20  # bytes of a socket, if the system allows it
FORCED = 32, 33  # SO_SNDBUFFORCE and SO_RCVBUFFORCE: beyond the system's usual limit
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
WHO = struct.Struct("!IB")  # a rank, and what it calls for
DATA, ALARM = USES = 0, 1
Line = tuple[int, int]  # a peer, and what for
Gather = Callable[[Any], list[Any]]  # every rank's value, in rank order


def connect(members: Members, me: int, gather: Gather, uses: tuple[int, ...] = USES) -> None:
    """Connects these ranks with each other, where all can reach all; each of them calls it.

    Each pair has a connection for messages and one for the alarm, in however many groups it is.
    """
    now = world_state()
    if members in now.wires.asked:
        return
    everywhere, found = False, None
    if len(members) <= MOST:
        with socket.socket() as listener:
            offers = dict(zip(members, gather(_offer(listener)), strict=True))
            known = {(p, DATA) for p in now.wires.known} | {(p, ALARM) for p in now.alarm.lines}
            wanted = {(p, use) for p in members if p != me for use in uses} - known
            found = _connected(listener, me, wanted, offers)
            everywhere = all(gather(found is not None))
    if not everywhere:
        _close(found)
        now.wires.settle(members, me, None)
        now.alarm.watch()
        if me == members[0] and len(members) <= MOST and DATA in uses:
            warnings.warn(
                "workers cannot connect to each other's ports; gloo carries all messages, of which "
                "small ones take longer",
                stacklevel=2,
            )
        return
    found = found or {}
    data = {peer: _set_up(s) for (peer, use), s in found.items() if use == DATA}
    now.wires.settle(members, me, data if DATA in uses else None)
    now.alarm.listen(members, {peer: s for (peer, use), s in found.items() if use == ALARM})


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
    listener: socket.socket, me: int, wanted: set[Line], offers: dict[int, Any]
) -> dict[Line, socket.socket] | None:
    """Connections to peers: this rank calls those below it, and is called by the others."""
    if None in offers.values():
        return None
    machines = {offer["machine"] for offer in offers.values()}
    if len(machines) > 1 and any(offer["at"][0].startswith("127.") for offer in offers.values()):
        return None  # an address that leads nowhere from another machine
    token = next(iter(offers.values()))["token"]
    found: dict[Line, socket.socket] = {}
    end = time.monotonic() + PATIENCE
    try:
        for peer, use in sorted(line for line in wanted if line[0] < me):
            found[peer, use] = socket.create_connection(offers[peer]["at"], _left(end))
            found[peer, use].sendall(token + WHO.pack(me, use))
        while found.keys() != wanted:
            listener.settimeout(_left(end))
            caller, _ = listener.accept()
            line = _greeting(caller, token, end)
            if line in wanted - found.keys():
                found[line] = caller
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


def _greeting(caller: socket.socket, token: bytes, end: float) -> Line | None:
    """The rank that calls, and for what; None if it does not know the token."""
    said, length = b"", len(token) + WHO.size
    try:
        while len(said) < length:
            caller.settimeout(_left(end))
            if not (more := caller.recv(length - len(said))):
                return None
            said += more
    except OSError:
        return None
    known = secrets.compare_digest(said[: len(token)], token)
    return WHO.unpack(said[len(token) :]) if known else None  # type: ignore[return-value]


def _set_up(connection: socket.socket) -> socket.socket:
    """Messages leave at once, and the system keeps those that nobody reads yet."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in FORCED:
        with suppress(OSError):  # only for administrators; else the system finds a size itself
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    return connection


def _close(found: dict[Line, socket.socket] | None) -> None:
    for connection in (found or {}).values():
        connection.close()
