"""One rank's failure ends all ranks at once: whoever fails says why, and whoever waits is woken.

Ranks are connected for this alone, and a thread that sleeps until somebody fails listens. Where
they cannot connect, the store of the process group is asked now and then. After a failure nobody
knows what its peers have sent, so everything that is tried later fails with the same sentence. Who
is told tells the ranks of its other groups; groups that have no rank in common do not hear of it.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from zlib import crc32

from shardwise.errors import LostPeer

LONGEST = 4000  # bytes of a sentence
PATIENCE = 4.0  # seconds at most for a peer to say its sentence, or to take one
INTERVAL = 0.5  # seconds between two looks into the store
KEY = "shardwise/failure"


class Alarm:
    """What this process knows of failures in its world, and how it tells the others."""

    def __init__(self, wake: Callable[[], None], store: Callable[[], Any]) -> None:
        """`wake` ends all waits inside torch; ranks that are not connected look into the store."""
        self.sentence = ""  # why nothing can be sent any more
        self._wake, self._store = wake, store
        self._bell, self._rope = socket.socketpair()
        self.lines: dict[int, socket.socket] = {}  # to ranks that are connected, by global rank
        self._groups: dict[tuple[int, ...], bool] = {}  # of ranks; whether they are connected
        self._watching = False
        self._once = threading.Lock()
        self._known, self._done = threading.Event(), threading.Event()

    @property
    def bell(self) -> int:
        """A file descriptor that can be read from, for ever, after a failure."""
        return self._bell.fileno()

    def check(self) -> None:
        if self.sentence:
            self._done.wait(PATIENCE)  # who raises may leave, with torch's memory
            raise LostPeer(self.sentence)

    def heard(self, seconds: float) -> str:
        """The sentence of a failure, if one becomes known in this time."""
        if not self._known.wait(seconds) and seconds and self._keys():
            _aside(self._ask)
        if self.sentence:
            self._done.wait(PATIENCE)
        return self.sentence

    def sound(self, sentence: str) -> None:
        """Tells everybody, and wakes whoever waits here; only the first failure counts."""
        with self._once:
            if self.sentence:
                return
            self.sentence = " ".join(sentence.split())
        self._tell(list(self.lines.values()))
        if keys := self._keys():
            _aside(lambda: [self._store().set(key, self._said()) for key in keys])
        self._known.set()
        self._rope.close()
        self._wake()
        self._done.set()

    def _said(self) -> bytes:
        return self.sentence.encode()[:LONGEST] + b"\n"

    def _tell(self, lines: Iterable[socket.socket]) -> None:
        for line in lines:
            with suppress(OSError):  # its other end may be dead
                line.send(self._said())

    # -- listening -----------------------------------------------------------------------------

    def expect(self, members: tuple[int, ...]) -> None:
        """These ranks wait for each other from now on; the store tells them until a line does."""
        self._groups.setdefault(members, False)

    def listen(self, members: tuple[int, ...], lines: Mapping[int, socket.socket]) -> None:
        """These ranks are connected, by new lines and by those that there were."""
        self._groups[members] = True
        for line in lines.values():
            line.settimeout(PATIENCE)
        self.lines |= lines
        if self.sentence:  # somebody has failed meanwhile
            self._tell(lines.values())
        if lines:
            _listener(self._hear, list(lines.values())).start()

    def watch(self) -> None:
        """From now on the store is looked into, by ranks that cannot connect."""
        if not self._watching:
            self._watching = True
            _listener(self._look).start()

    def _keys(self) -> list[str]:
        """Where in the store ranks say, and find, what they have no lines for."""
        apart = [members for members, connected in list(self._groups.items()) if not connected]
        return [f"{KEY}/{crc32(repr(members).encode())}" for members in apart]

    def _hear(self, peers: list[socket.socket]) -> None:
        """Returns when one of them has failed, or this rank, or the world has ended."""
        poll, known = select.poll(), {peer.fileno(): peer for peer in peers}
        for number in (self.bell, *known):
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == self.bell:
                    return
                if said := _line(known[number]):
                    return self.sound(said)
                poll.unregister(number)  # it has ended, well or not

    def _look(self) -> None:
        poll = select.poll()
        poll.register(self.bell, select.POLLIN)
        while not poll.poll(1000 * INTERVAL):
            try:
                self._ask()
            except (AttributeError, RuntimeError):  # the store has ended with the rank that held it
                return

    def _ask(self) -> None:
        """Looks into the store once."""
        store = self._store()
        for key in self._keys():
            if store.check([key]):
                return self.sound(store.get(key).decode())

    def close(self) -> None:
        """Ends listening; the world is over."""
        self._rope.close()
        for line in self.lines.values():
            line.close()


def _listener(listen: Callable[..., None], *args: Any) -> threading.Thread:
    return threading.Thread(target=listen, args=args, name="alarm", daemon=True)


def _aside(action: Callable[[], object]) -> None:
    """Tries something that may fail, or never return where the store's host is cut off."""

    def run() -> None:
        with suppress(AttributeError, RuntimeError):
            action()

    thread = _listener(run)
    thread.start()
    thread.join(PATIENCE)


def _line(peer: socket.socket) -> str:
    said = b""
    try:
        while not said.endswith(b"\n") and (more := peer.recv(LONGEST)):
            said += more
    except OSError:
        pass
    return said.decode(errors="replace").strip()
