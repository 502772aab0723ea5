"""Carries out all-reduce schedules over point-to-point messages, in a thread of its own.

Sums run one after the other, first in, first out. Every rank must start the sums that it shares
with others in the same order; each sum has a tag of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch

from shardwise.cluster.schedules import Message, Round, Rounds

CHUNK = 1 << 20  # bytes of a piece, which is added and sent on while the next ones arrive
AHEAD = 4  # pieces that may arrive before they are wanted


@dataclass(frozen=True)
class RoundPiece:
    """A piece of a message, and how many receives must be done before it is sent."""

    peer: int
    start: int
    stop: int
    adds: bool
    after: int = 0


@dataclass(frozen=True)
class Pipeline:
    """What one rank sends and receives, each in the order of the rounds: one stream of pieces.

    A piece is sent as soon as what it holds has arrived, whatever else of its round is still under
    way, so that a round begins before the last one is over.
    """

    sends: tuple[RoundPiece, ...]
    receives: tuple[RoundPiece, ...]


@lru_cache(maxsize=256)
def pipeline(rounds: Rounds, chunk: int) -> Pipeline:
    """The rounds in pieces of at most so many numbers, cut alike at both ends.

    >>> hop = Round((Message(1, 0, 4),), (Message(1, 4, 8),)), Round((Message(1, 4, 8),), ())
    >>> [(piece.start, piece.after) for piece in pipeline(hop, 2).sends]
    [(0, 0), (2, 0), (4, 1), (6, 2)]
    """
    sends: list[RoundPiece] = []
    receives: list[RoundPiece] = []
    arrived: list[tuple[int, Message]] = []  # with the place of its first piece among all
    for one in rounds:
        for cut in _cut(one.sends, one, chunk):
            after = max(_needed(cut, arrived, chunk), sends[-1].after if sends else 0)
            sends.append(RoundPiece(cut.peer, cut.start, cut.stop, cut.adds, after))
        for message in one.receives:
            arrived.append((len(receives), message))
            receives += _cut((message,), one, chunk)
    return Pipeline(tuple(sends), tuple(receives))


def _cut(messages: tuple[Message, ...], one: Round, chunk: int) -> Iterator[RoundPiece]:
    for message in messages:
        for start in range(message.start, message.stop, chunk):
            yield RoundPiece(message.peer, start, min(start + chunk, message.stop), one.adds)


def _needed(piece: RoundPiece, arrived: list[tuple[int, Message]], chunk: int) -> int:
    """How many receives there are up to the last one that overlaps a piece."""
    for place, message in reversed(arrived):
        last = min(piece.stop, message.stop)
        if max(piece.start, message.start) < last:
            return place + (last - 1 - message.start) // chunk + 1
    return 0


class Interrupted(RuntimeError):
    """A sum that could not go on, and the peer that it waited for."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peers = (peer,)


@dataclass(frozen=True, eq=False)
class Job:
    """A sum under way, with the methods of torch's work."""

    function: Callable[[], None]
    runner: Runner
    future: Future[None] = field(default_factory=Future)

    def wait(self, _: timedelta | None = None) -> None:
        """Returns when it is done; whoever waits lends a hand rather than wait for a thread."""
        self.runner.work_off(self)
        self.future.result()

    def get_future(self) -> Future[None]:
        return self.future

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class Runner:
    """Runs jobs one after the other, in a thread that starts when there is something to do."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._at_work = threading.Lock()  # whoever has it runs the next job
        self._wake = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[], None]) -> Job:
        if self._thread is None:
            # A daemon: a process that ends does not wait for peers that will not come.
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        job = Job(function, self)
        self._jobs.append(job)
        self._wake.release()
        return job

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            self.work_off()

    def work_off(self, until: Job | None = None) -> None:
        """Runs what is there, first in, first out: the next job, or all up to this one."""
        while until is None or not until.future.done():
            with self._at_work:
                if not self._jobs or (until is not None and until.future.done()):
                    return
                self._jobs.popleft().run()
            if until is None:
                return


RUNNER = Runner()


@dataclass
class Summing:
    """One vector on its way through a schedule."""

    vector: torch.Tensor  # flat; the sum replaces it
    group: Any  # a process group
    places: Mapping[int, int]  # of the peers inside the process group
    tag: int  # of this sum's messages
    timeout: timedelta

    def run(self, rounds: Rounds) -> None:
        """Receives are posted ahead, so that peers may send at once; sends leave as they may."""
        stream = pipeline(rounds, max(CHUNK // self.vector.element_size(), 1))
        to_post, to_send = enumerate(stream.receives), deque(stream.sends)
        posted = deque(self._receive(*next_) for next_ in islice(to_post, AHEAD))
        sent = [self._send(piece) for piece in _ready(to_send, 0)]
        for done, piece in enumerate(stream.receives, start=1):
            buffer, work = posted.popleft()
            with _waiting_for(piece.peer):
                work.wait(self.timeout)
            if piece.adds:
                self._part(piece).add_(buffer)
            posted += (self._receive(*next_) for next_ in islice(to_post, 1))
            sent += [self._send(piece) for piece in _ready(to_send, done)]
        # Only now: what was sent stays as it is until its receiver answers with the sum.
        for peer, work in sent:
            with _waiting_for(peer):
                work.wait(self.timeout)

    def _part(self, piece: RoundPiece) -> torch.Tensor:
        return self.vector[piece.start : piece.stop]

    def _send(self, piece: RoundPiece) -> tuple[int, Any]:
        with _waiting_for(piece.peer):
            work = self.group.send([self._part(piece)], self.places[piece.peer], self.tag)
        return piece.peer, work

    def _receive(self, place: int, piece: RoundPiece) -> tuple[torch.Tensor, Any]:
        """A copy goes straight into the vector, what will be added into a buffer."""
        part = self._part(piece)
        buffer = self._buffer(place)[: part.numel()] if piece.adds else part
        with _waiting_for(piece.peer):
            return buffer, self.group.recv([buffer], self.places[piece.peer], self.tag)

    def _buffer(self, place: int) -> torch.Tensor:
        numel = max(CHUNK // self.vector.element_size(), 1)
        return _buffers(self.vector.dtype, numel, AHEAD)[place % AHEAD]


@lru_cache(maxsize=4)
def _buffers(dtype: torch.dtype, numel: int, count: int) -> torch.Tensor:
    """Where pieces arrive: kept, as new memory costs more than the sum; one thread uses them."""
    return torch.empty(count, numel, dtype=dtype)


def _ready(to_send: deque[RoundPiece], done: int) -> Iterator[RoundPiece]:
    """Takes the pieces that may be sent after so many receives; the order stays."""
    while to_send and to_send[0].after <= done:
        yield to_send.popleft()


@contextmanager
def _waiting_for(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Interrupted(peer, str(error)) from error


def start_sum(
    vector: torch.Tensor,
    rounds: Rounds,
    group: Any,
    places: Mapping[int, int],
    tag: int,
    timeout: float,
) -> Job:
    """Replaces a flat vector in the host's memory by its sum over a group, in our own thread."""
    summing = Summing(vector, group, places, tag, timedelta(seconds=timeout))
    return RUNNER.start(partial(summing.run, rounds))
