"""Carries out all-reduce schedules over point-to-point messages, in a thread of its own.

The thread takes jobs first in, first out. Every rank must start the sums that it shares with others
in the same order, on process groups on which nothing else sends messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from typing import Any

import torch

from shardwise.comm.schedules import Message, Round, Rounds

CHUNK = 1 << 20  # bytes that are added while the next ones arrive
AHEAD = 2  # chunks that may arrive before they are added

Chunks = list[tuple[int, torch.Tensor]]  # with the peer that each goes to or comes from


class Interrupted(RuntimeError):
    """A sum that could not go on, and the peer that it waited for."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peers = (peer,)


@dataclass(frozen=True)
class Job:
    """A sum under way, with the methods of torch's work."""

    future: Future[None]

    def wait(self) -> None:
        self.future.result()

    def get_future(self) -> Future[None]:
        return self.future


class Thread:
    """Runs functions one after the other; started when there is something to do."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[Rounds], None], Rounds, Future[None]]] = (
            SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[Rounds], None], rounds: Rounds) -> Job:
        if self._thread is None:
            # A daemon: a process that ends does not wait for peers that will not come.
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._jobs.put((function, rounds, future))
        return Job(future)

    def _run(self) -> None:
        while True:
            function, rounds, future = self._jobs.get()
            try:
                function(rounds)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del function, future  # the vector may go while the thread waits


THREAD = Thread()


@dataclass
class Summing:
    """One vector on its way through a schedule."""

    vector: torch.Tensor  # flat; the sum replaces it
    group: Any  # a process group
    places: Mapping[int, int]  # of the peers inside the process group
    sent: list[tuple[int, Any]] = field(default_factory=list)

    def run(self, rounds: Rounds) -> None:
        for one in rounds:
            self._round(one)
        # Only now: what was sent stays as it is until its receiver answers with the sum.
        for peer, work in self.sent:
            with _waiting_for(peer):
                work.wait()

    def _round(self, one: Round) -> None:
        """Receives are posted first, so that peers may send at once."""
        chunks = self._chunks(one.receives, one.adds)
        ahead = AHEAD if one.adds else len(chunks)
        arriving = deque(
            self._receive(chunks, place, one.adds) for place in range(len(chunks[:ahead]))
        )
        for peer, part in self._chunks(one.sends, one.adds):
            with _waiting_for(peer):
                self.sent.append((peer, self.group.send([part], self.places[peer], 0)))
        for place, (peer, part) in enumerate(chunks):
            buffer, work = arriving.popleft()
            with _waiting_for(peer):
                work.wait()
            if one.adds:
                part.add_(buffer)
            if place + ahead < len(chunks):
                arriving.append(self._receive(chunks, place + ahead, one.adds))

    def _receive(self, chunks: Chunks, place: int, adds: bool) -> tuple[torch.Tensor, Any]:
        """A copy goes straight into the vector, what will be added into a buffer."""
        peer, part = chunks[place]
        buffer = self.buffers[place % AHEAD][: part.numel()] if adds else part
        with _waiting_for(peer):
            return buffer, self.group.recv([buffer], self.places[peer], 0)

    def _chunks(self, messages: Sequence[Message], adds: bool) -> Chunks:
        """What is added goes in chunks, cut alike at both ends; copies go whole."""
        found = []
        for message in messages:
            part = self.vector[message.start : message.stop]
            cut = part.split(CHUNK // part.element_size()) if adds else (part,)
            found += [(message.peer, chunk) for chunk in cut]
        return found

    @cached_property
    def buffers(self) -> torch.Tensor:
        numel = min(CHUNK // self.vector.element_size(), self.vector.numel())
        return torch.empty(AHEAD, numel, dtype=self.vector.dtype)


@contextmanager
def _waiting_for(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Interrupted(peer, str(error)) from error


def start_sum(vector: torch.Tensor, rounds: Rounds, group: Any, places: Mapping[int, int]) -> Job:
    """Replaces a flat vector in the host's memory by its sum over a group, in our own thread."""
    return THREAD.start(Summing(vector, group, places).run, rounds)
