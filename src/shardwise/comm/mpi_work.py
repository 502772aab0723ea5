"""Communications of MPI under way, and the thread that keeps them moving."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from shardwise.comm.world_state import world_state

SPIN = 200e-6  # seconds of asking without sleep: most messages of one host come within that
NAP = 50e-6, 1e-3  # shortest and longest sleep of a rank that waits, which may share its core
# Seconds between two rounds of the thread that keeps messages moving. With 1 ms, a small network's
# step on two cores takes 1.4 times as long as without the thread; with 5 ms, as long.
ROUND = 5e-3

Finish = Callable[[], Any]


class MPIWork(dist.Work):
    """One communication under way; its buffers stay alive until it is over."""

    def __init__(
        self, request: MPI.Request, what: str, seconds: float, keep: Any, finish: Finish | None
    ) -> None:
        super().__init__()
        self._request, self._what, self._seconds = request, what, seconds
        self._keep, self._finish = keep, finish
        self._inference = torch.is_inference_mode_enabled()  # whichever thread finishes
        self._lock = threading.Lock()  # two threads must not complete one request
        self._over = False
        self._error: RuntimeError | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        _progress.watch(self)

    def is_completed(self) -> bool:
        if self._over:
            return True
        with self._lock:
            if not self._over:
                self._ask()
        return self._over

    def _ask(self) -> None:
        try:
            if not self._request.Test():
                return
            if self._finish is not None:
                with torch.inference_mode(self._inference), torch.no_grad():
                    self._finish()
        except RuntimeError as error:
            self._error = error
        self._keep = self._finish = None
        self._over = True
        if self._error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(self._error)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> RuntimeError | None:
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the communication is over; raises if that takes longer than the timeout."""
        seconds = timeout.total_seconds() if timeout else self._seconds
        start = time.monotonic()
        while not self.is_completed():
            waited = time.monotonic() - start
            if waited > seconds:
                raise RuntimeError(f"MPI: {self._what} was not over within {seconds:g} s")
            world_state().alarm.check()
            if waited < SPIN:
                os.sched_yield()
            else:
                time.sleep(min(max(NAP[0], waited / 20), NAP[1]))
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Progress:
    """A thread that asks after everything under way, so that it moves while the others compute."""

    def __init__(self) -> None:
        self._works: list[MPIWork] = []
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, work: MPIWork) -> None:
        with self._change:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            elif len(self._works) == 1:
                self._change.notify()

    def stop(self) -> None:
        """What is still under way is given up: MPI must not be called after its end."""
        with self._change:
            thread, self._thread, self._works = self._thread, None, []
            self._change.notify()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            time.sleep(ROUND)  # first: what is over by then needed no help
            works = self._works[:]
            over = {id(work) for work in works if work.is_completed()}
            with self._change:
                self._works = [work for work in self._works if id(work) not in over]
                while not self._works and self._thread is me:
                    self._change.wait()


_progress = _Progress()
atexit.register(_progress.stop)
