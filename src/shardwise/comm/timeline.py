"""What one rank does, moment by moment, when somebody wants to know."""

from __future__ import annotations

import time
from typing import NamedTuple


class Event(NamedTuple):
    """One activity of this rank, in seconds since the timeline began."""

    name: str
    kind: str
    lane: str
    start: float
    end: float
    blocked: float | None  # seconds that the rank waited for it, of a communication


class Timeline:
    """The activities of this rank: its main thread has one at a time, messages fly beside it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on = False
        self.place = ""  # the layer that the main thread was at, if it fails
        self._origin = 0.0
        self._current: tuple[str, str, float] | None = None

    def begin(self) -> None:
        """Forgets what was, and notes from now on what happens."""
        self.events, self.on, self._current = [], True, None
        self._origin = time.perf_counter()

    def end(self) -> list[Event]:
        self.switch()
        self.on = False
        return self.events

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def switch(self, name: str = "", kind: str = "") -> tuple[str, str]:
        """The main thread turns to this computation (to none: it waits, or is between layers).

        Returns what it did before.
        """
        self.place = name or self.place
        if not self.on:
            return "", ""
        now, before = self.now(), ("", "")
        if self._current is not None:
            *before, start = self._current
            if before[0]:
                self.events.append(Event(before[0], before[1], "compute", start, now, None))
        self._current = (name, kind, now)
        return before[0], before[1]

    def add(self, name: str, kind: str, lane: str, start: float, end: float, wait: float) -> None:
        """A communication that is over."""
        if self.on:
            self.events.append(Event(name, kind, lane, start, end, wait))
