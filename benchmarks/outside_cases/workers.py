"""Runs cases in processes that may crash or hang: such a case is reported, the others go on."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from outside_cases import source
from outside_cases.case import Case, number
from outside_cases.trial import SLOW, TRACEBACK, Verdict, attempt

BUILDING = 60.0  # seconds of computing that making the cases of a group may take
PATIENCE = 6.0  # so many times longer may it take by the clock: machines are shared
AT_ONCE = 400  # cases after which a process is replaced, so that none grows without end


@dataclass(frozen=True)
class Chunk:
    """Some cases of one group: so many at most, drawn with the seed, or exactly those named."""

    source: str
    group: str
    most: int | None
    seed: int
    only: str = ""

    def cases(self) -> list[Case]:
        found: list[Case] = source(self.source).cases(self.group)
        if self.only:
            return [case for case in found if case.name == self.only] or found
        if self.most is not None and len(found) > self.most:
            draw = random.Random(number(self.group) + self.seed)
            found = [found[i] for i in sorted(draw.sample(range(len(found)), self.most))]
        return found


def _serve(pipe: Connection) -> None:
    """A process's life: takes a chunk and the names to leave out, answers with verdicts."""
    warnings.simplefilter("ignore")
    logging.disable()  # torch.export logs tracebacks of what it refuses
    while True:
        chunk, done = pipe.recv()
        try:
            cases = chunk.cases()
        except Exception as error:
            name = f"{chunk.source}:{chunk.group}:*"
            reason = f"its samples cannot be made: {error!r}"
            pipe.send(Verdict(TRACEBACK, reason, "", name, chunk.seed))
            cases = []
        for case in cases:
            if case.name not in done:
                pipe.send(case.name)
                pipe.send(case.seconds)
                pipe.send(attempt(case, chunk.seed))
        pipe.send(None)


@dataclass
class Worker:
    """A process with what it is doing at the moment."""

    chunk: Chunk | None = None
    done: set[str] = field(default_factory=set)
    current: str = ""
    num_cases: int = 0

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.num_cases = 0

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def give(self, chunk: Chunk) -> None:
        if self.num_cases > AT_ONCE:
            self.end()
            self._start()
        self.chunk, self.done = chunk, set()
        self._send()

    def _send(self) -> None:
        self.current = ""
        self._allow(BUILDING)
        self.pipe.send((self.chunk, self.done))

    def _allow(self, seconds: float) -> None:
        """From now on the process may compute for so many seconds."""
        self.begin = time.monotonic(), self._computed()
        self.seconds = seconds

    def _computed(self) -> float:
        """How many seconds the process has computed, where the system says so."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def is_late(self) -> bool:
        clock, computed = self.begin
        waited = time.monotonic() - clock
        if waited < self.seconds:
            return False
        return self._computed() - computed > self.seconds or waited > PATIENCE * self.seconds

    def take(self, message: Any) -> Verdict | None:
        """Notes what the process said."""
        if isinstance(message, str):
            self.current = message
        elif isinstance(message, float):
            self._allow(message)
        elif isinstance(message, Verdict):
            self.done.add(message.case)
            self.num_cases += 1
            self._allow(BUILDING)
            return message
        else:
            self.chunk = None
        return None

    def lost(self, kind: str, reason: str) -> Verdict:
        """The verdict about the case at which the process ended; a new one goes on after it."""
        assert self.chunk is not None
        self.end()
        chunk, name = self.chunk, self.current
        name = name or f"{chunk.source}:{chunk.group}:*"
        self.done.add(name)
        self._start()
        if self.current:
            self._send()
        else:
            self.chunk = None
        return Verdict(kind, reason, "", name, chunk.seed)


def run(chunks: list[Chunk], jobs: int, go_on: Callable[[], bool]) -> Iterator[Verdict]:
    """The verdicts about all cases of all chunks, as they come, until `go_on` says no."""
    todo, workers = chunks[::-1], [Worker() for _ in range(jobs)]
    try:
        while True:
            for worker in workers:
                if worker.chunk is None and todo and go_on():
                    worker.give(todo.pop())
            busy = {worker.pipe: worker for worker in workers if worker.chunk is not None}
            if not busy:
                return
            ready = wait(list(busy), timeout=1.0)
            for pipe, worker in busy.items():
                verdict = None
                try:
                    if pipe in ready:
                        verdict = worker.take(pipe.recv())
                    elif worker.is_late:
                        verdict = worker.lost(SLOW, "no answer in time")
                except (EOFError, OSError):
                    worker.process.join()
                    code = worker.process.exitcode
                    verdict = worker.lost(TRACEBACK, f"the process ended with {code}")
                if verdict is not None:
                    yield verdict
    finally:
        for worker in workers:
            worker.end()
