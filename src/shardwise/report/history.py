"""The history of a run as curves: one line of metrics.jsonl is one point of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.report.trace_data import RANKS, short

History = Sequence[Mapping[str, Any]]

PLACES = ("step", "epoch")  # what a line may be counted by
LEFT_OUT = {*PLACES, "seconds", "time"}
POINTS = 400  # of a curve; a screen does not show more
TOGETHER = ("loss", "accuracy")  # curves whose names hold one of these share a chart


def read_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; one that is broken is named.

    The last line may be cut off: a run that was killed leaves it so.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ShardwiseError(f"the metrics file {str(path)!r} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and found:
                break
            raise ShardwiseError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
        if not isinstance(entry, dict):
            raise ShardwiseError(
                f"{path}, line {number} must be an object such as "
                f'{{"step": 1, "loss": 2.3}}, and is {line[:60]!r}'
            )
        found.append(entry)
    return found


def charts(history: History) -> list[dict[str, Any]]:
    """Curves of every number in the history; losses share a chart, and so do accuracies."""
    place = next((p for p in PLACES if all(_is_number(line.get(p)) for line in history)), None)
    curves: dict[str, list[tuple[float, float]]] = {}
    for i, line in enumerate(history):
        x = float(line[place]) if place else float(i + 1)
        for name, y in line.items():
            if name not in LEFT_OUT and _is_number(y) and isfinite(x):
                curves.setdefault(name, []).append((x, float(y)))
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(curves, key=_rank):
        title = next((word for word in TOGETHER if word in name.lower()), name)
        chart = found.setdefault(title, {"title": title, "x": place or "line", "curves": []})
        chart["curves"].append({"name": name, **_curve(curves[name])})
    return list(found.values())


def _rank(name: str) -> tuple[int, str]:
    """Losses first, then accuracies and the rate, then the rest by name."""
    first = (*TOGETHER, "samples_per_second")
    return next((i for i, word in enumerate(first) if word in name.lower()), len(first)), name


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _curve(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """At most `POINTS` points, each the mean of its neighbours."""
    size = -(-len(points) // POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return {
        "x": [short(sum(x for x, _ in group) / len(group), 6) for group in groups],
        "y": [short(sum(y for _, y in group) / len(group), 6) for group in groups],
        "each": size,
        "last": short(points[-1][1], 6),
    }


def compared(runs: Mapping[str, History]) -> list[dict[str, Any]]:
    """The charts of several runs, each chart with the curves of all; one run has those of its own.

    >>> compared({"a": [{"step": 1, "loss": 2.0}], "b": [{"step": 1, "loss": 3.0}]})[0]["title"]
    'loss'
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for place, (run, history) in enumerate(runs.items()):
        for chart in charts(history):
            mine = found.setdefault((chart["title"], chart["x"]), chart | {"curves": []})
            first = chart["curves"][0]["name"]
            for curve in chart["curves"]:
                owned = {
                    "name": f"{run}: {curve['name']}",
                    "first": f"{run}: {first}",
                    "run": place,
                }
                mine["curves"].append(curve if len(runs) == 1 else curve | owned)
    return list(found.values())


def memory_over_time(history: History) -> dict[str, Any] | None:
    """The chart of `memory_bytes`, a curve per rank, where it was written more than once."""
    lines = [line for line in history if _held(line)]
    ranks = min((len(_held(line)) for line in lines), default=0)
    if len(lines) < 2:
        return None
    named = [
        {p: line[p] for p in PLACES if p in line}
        | {f"rank {rank}": _held(line)[rank] / 2**20 for rank in range(min(ranks, RANKS))}
        for line in lines
    ]
    found = charts(named)
    curves = [curve for chart in found for curve in chart["curves"]]
    curves.sort(key=lambda curve: int(curve["name"].split()[1]))
    return {"title": "MiB of each rank", "x": found[0]["x"], "curves": curves}


def _held(line: Mapping[str, Any]) -> list[float]:
    held = line.get("memory_bytes")
    return held if isinstance(held, list) and held and all(map(_is_number, held)) else []


def measured_memory(history: History) -> list[int]:
    """Bytes per rank of the last line that has `memory_bytes`, a list with one number per rank."""
    for line in reversed(history):
        if _held(line):
            return [round(value) for value in _held(line)]
    return []
