"""One rank's failure ends all ranks at once: whoever fails says why, and whoever waits is woken.

Ranks are connected for this alone, and a thread that sleeps until somebody fails listens. Where
they cannot connect, the store of the process group is asked now and then. After a failure nobody
knows what its peers have sent, so everything that is tried later fails with the same sentence.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from shardwise.errors import ShardwiseError

LONGEST = 4000  # bytes of a sentence
PATIENCE = 1.0  # seconds for a peer to say its sentence, or to take one
INTERVAL = 0.5  # seconds between two looks into the store
KEY = "shardwise/failure"


class LostPeer(ShardwiseError):
    """A rank that failed, died, or was cut off, while another needed it."""


class Alarm:
    """What this process knows of failures in its world, and how it tells the others."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` ends all waits inside torch, once, after a failure."""
        self.sentence = ""  # why nothing can be sent any more
        self._wake = wake
        self._bell, self._rope = socket.socketpair()
        self._peers: list[socket.socket] = []
        self._store: Any = None
        self._once = threading.Lock()
        self._known = threading.Event()

    @property
    def bell(self) -> int:
        """A file descriptor that can be read from, for ever, after a failure."""
        return self._bell.fileno()

    def check(self) -> None:
        if self.sentence:
            raise LostPeer(self.sentence)

    def heard(self, seconds: float) -> str:
        """The sentence of a failure, if one becomes known in this time."""
        self._known.wait(seconds)
        return self.sentence

    def sound(self, sentence: str) -> None:
        """Tells everybody, and wakes whoever waits here; only the first failure counts."""
        with self._once:
            if self.sentence:
                return
            self.sentence = " ".join(sentence.split())
        said = self.sentence.encode()[:LONGEST] + b"\n"
        for peer in self._peers:
            with suppress(OSError):  # it may be dead
                peer.send(said)
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(KEY, said)
        self._known.set()
        self._rope.close()
        if not self._peers and self._store is None:
            self._wake()  # else whoever listens does

    # -- listening -----------------------------------------------------------------------------

    def listen(self, peers: Iterable[socket.socket]) -> None:
        """From now on these connections are used to tell and to be told."""
        peers = list(peers)
        for peer in peers:
            peer.settimeout(PATIENCE)
        self._peers += peers
        self._start(lambda: self._hear(peers))

    def watch(self, store: Any) -> None:
        """From now on this store is used, by ranks that cannot connect."""
        if self._store is None and store is not None:
            self._store = store
            self._start(self._look)

    def _start(self, listen: Callable[[], str]) -> None:
        def run() -> None:
            said = listen()
            if said:
                self.sound(said)
            if self.sentence:
                self._wake()

        threading.Thread(target=run, name="alarm", daemon=True).start()

    def _hear(self, peers: list[socket.socket]) -> str:
        """What one of them says; nothing when the world has ended or failed."""
        poll, known = select.poll(), {peer.fileno(): peer for peer in peers}
        for number in (self.bell, *known):
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == self.bell:
                    return ""
                if said := _line(known[number]):
                    return said
                poll.unregister(number)  # it has ended, well or not

    def _look(self) -> str:
        poll = select.poll()
        poll.register(self.bell, select.POLLIN)
        try:
            while not poll.poll(1000 * INTERVAL):
                if self._store.check([KEY]):
                    return self._store.get(KEY).decode()
        except RuntimeError:  # the store has ended with the rank that held it
            pass
        return ""

    def close(self) -> None:
        """Ends listening; the world is over."""
        self._rope.close()
        for peer in self._peers:
            peer.close()


def _line(peer: socket.socket) -> str:
    said = b""
    try:
        while not said.endswith(b"\n") and (more := peer.recv(LONGEST)):
            said += more
    except OSError:
        pass
    return said.decode(errors="replace").strip()
