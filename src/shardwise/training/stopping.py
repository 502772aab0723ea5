"""Ending a run early: a signal to any rank stops all of them after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch

from shardwise.comm import About, Communicator, Pending

ABOUT = About("the wish to stop")


class StopSignal:
    """Whether some rank was told to end, by SIGTERM; what all ranks know at the same step.

    The ranks' answers travel while they compute: what was asked for in one step is known in the
    next.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._told = comm.in_lane("stop"), False
        self._everybody = tuple(range(comm.size))
        self._comm.prepare([self._everybody])
        self._answer = torch.zeros(1, device=device)
        self._pending: Pending | None = None
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def asked(self) -> bool:
        """Called by all ranks once per step."""
        if self._pending is not None:
            self._pending.wait()
            if self._answer.item() > 0:
                return True
        self._answer.fill_(float(self._told))
        self._pending = self._comm.all_reduce(self._everybody, self._answer, ABOUT)
        return False
