"""What happened when, on every rank: the same for a simulated step and for a measured one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from shardwise.errors import ShardwiseError
from shardwise.files import first_mistake, write_whole

LANES = ("compute", "transfers", "gradients")


@dataclass(frozen=True, eq=False)
class Span:
    """One activity on every rank; where it did not happen it ends as it begins."""

    name: str
    kind: str  # forward, backward, recompute, update, transfer, statistics, gradients
    lane: str
    starts: np.ndarray  # seconds [world]
    ends: np.ndarray
    blocked: np.ndarray | None = None  # seconds that the rank waited for it, of a communication

    @property
    def seconds(self) -> np.ndarray:
        return self.ends - self.starts


# Of one rank: name, kind, lane, start, end, and the seconds it was blocked on a communication.
Activity = tuple[str, str, str, float, float, float | None]


def _merged(activities: dict[int, Activity], world: int) -> Span:
    name, kind, lane, first, *_ = next(iter(activities.values()))
    starts, ends, blocked = np.full(world, first), np.full(world, first), np.zeros(world)
    waits = False
    for rank, (_, _, _, start, end, wait) in activities.items():
        starts[rank], ends[rank] = start, end
        waits, blocked[rank] = wait is not None, wait or 0.0
    return Span(name, kind, lane, starts, ends, blocked if waits else None)


@dataclass(eq=False)
class Trace:
    """The spans of one training step."""

    world: int
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def of_ranks(cls, ranks: Sequence[Sequence[Activity]]) -> Trace:
        """One trace from what every rank noted; activities of one name go together in order."""
        found: dict[tuple[Any, ...], dict[int, Activity]] = {}
        for rank, activities in enumerate(ranks):
            seen: Counter[tuple[str, ...]] = Counter()
            for activity in activities:
                kind = activity[:3]
                found.setdefault((*kind, seen[kind]), {})[rank] = activity
                seen[kind] += 1
        spans = [_merged(own, len(ranks)) for own in found.values()]
        return cls(len(ranks), sorted(spans, key=lambda span: float(span.starts.min())))

    @property
    def seconds(self) -> float:
        """From the first activity to the last, on any rank."""
        return max((float(span.ends.max()) for span in self.spans), default=0.0)

    def per_rank(self, lane: str) -> np.ndarray:
        """Seconds of activity in a lane; [world]."""
        spans = [span.seconds for span in self.spans if span.lane == lane]
        return np.sum(spans, axis=0) if spans else np.zeros(self.world)

    @property
    def busy(self) -> np.ndarray:
        """Seconds that each rank computes."""
        return self.per_rank("compute")

    @property
    def waiting(self) -> np.ndarray:
        """Seconds that each rank does not compute."""
        return self.seconds - self.busy

    @property
    def communication(self) -> np.ndarray:
        """Seconds of communication per rank, hidden or not."""
        return self.per_rank("transfers") + self.per_rank("gradients")

    @property
    def exposed(self) -> np.ndarray:
        """Seconds that each rank was blocked on communication."""
        blocked = [span.blocked for span in self.spans if span.blocked is not None]
        return np.sum(blocked, axis=0) if blocked else np.zeros(self.world)

    @property
    def overlap(self) -> float:
        """The part of communication that was hidden (P3, equation 11), from 0 to 1."""
        total = float(self.communication.sum())
        return float((total - self.exposed.sum()) / total) if total > 0 else 1.0

    @property
    def kinds(self) -> dict[str, np.ndarray]:
        """Seconds per rank of every kind of activity; what blocks counts, not what flies."""
        found: dict[str, np.ndarray] = {}
        for span in self.spans:
            seconds = span.seconds if span.blocked is None else span.blocked
            found[span.kind] = found.get(span.kind, np.zeros(self.world)) + seconds
        return found

    # -- files ---------------------------------------------------------------------------------

    def to_perfetto(self, ranks: int = 64) -> dict[str, Any]:
        """The trace in the form that Chrome's and Perfetto's viewers read, for the first ranks."""
        shown = range(min(ranks, self.world))
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [*self._names(shown), *self._events(shown)],
        }

    def _names(self, ranks: range) -> Iterator[dict[str, Any]]:
        for rank in ranks:
            head = {"ph": "M", "pid": rank}
            yield {**head, "name": "process_name", "args": {"name": f"rank {rank}"}}
            for lane, name in enumerate(LANES):
                yield {**head, "name": "thread_name", "tid": lane, "args": {"name": name}}

    def _events(self, ranks: range) -> Iterator[dict[str, Any]]:
        for span in self.spans:
            for rank in ranks:
                start, end = float(span.starts[rank]), float(span.ends[rank])
                if end > start:
                    event = {
                        "name": span.name,
                        "cat": span.kind,
                        "ph": "X",
                        "pid": rank,
                        "tid": LANES.index(span.lane),
                        "ts": start * 1e6,
                        "dur": (end - start) * 1e6,
                    }
                    if span.blocked is not None:
                        event["args"] = {"blocked": float(span.blocked[rank]) * 1e6}
                    yield event

    def save(self, path: str | Path, ranks: int = 64) -> None:
        """Writes the Perfetto form to a file."""
        try:
            write_whole(path, json.dumps(self.to_perfetto(ranks)))
        except OSError as error:
            message = f"the trace file {str(path)!r} cannot be written: {error}"
            raise ShardwiseError(message) from None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads what `save` has written; the ranks that were not saved are not known."""
        try:
            file = _TraceFile.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            message = f"the trace file {str(path)!r} cannot be read: {error}"
            raise ShardwiseError(message) from None
        except ValidationError as error:
            raise ShardwiseError(f"trace file {str(path)!r}: {first_mistake(error)}") from None
        ranks: list[list[Activity]] = [[] for _ in range(1 + max(e.pid for e in file.traceEvents))]
        for event in file.traceEvents:
            if isinstance(event, _Event):
                ranks[event.pid].append(event.activity())
        return cls.of_ranks(ranks)


_Rank = Annotated[int, Field(ge=0, lt=1 << 16)]
_Microseconds = Annotated[float, Field(ge=0, le=1e15)]  # more than any clock shows


class _Head(BaseModel):
    """The name of a rank or of one of its lanes."""

    ph: Literal["M"]
    pid: _Rank


class _Arguments(BaseModel):
    blocked: _Microseconds | None = None


class _Event(BaseModel):
    ph: Literal["X"]
    name: str
    cat: str
    pid: _Rank
    tid: int = Field(ge=0, lt=len(LANES))
    ts: _Microseconds
    dur: _Microseconds
    args: _Arguments = _Arguments()

    def activity(self) -> Activity:
        start, end, wait = self.ts / 1e6, (self.ts + self.dur) / 1e6, self.args.blocked
        blocked = None if wait is None else wait / 1e6
        return self.name, self.cat, LANES[self.tid], start, end, blocked


class _TraceFile(BaseModel):
    traceEvents: list[Annotated[_Head | _Event, Field(discriminator="ph")]] = Field(min_length=1)
