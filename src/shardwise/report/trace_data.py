"""A trace as plain data for the page: what each rank does when, and what each layer takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shardwise.plans.trace import LANES, Span, Trace

RANKS = 16  # drawn; more do not fit a screen, and ranks of one step look alike
TICKS = 1_000_000  # per step: finer than any screen, and whole numbers keep the page small

# What the names of communications add to the name of the layer that they belong to.
PURPOSE = re.compile(r"(>\d+|~)?( gradient)?( statistics| to all| to rank 0)?( packed| unpacked)?$")
PARTS = ("forward", "backward", "copy", "communication")
WHOLE = ("gradients", "update")  # kinds of activities that serve many layers at once
OTHERS = {"gradients": "sums of gradients", "copy": "sums of gradients", "update": "optimizer"}


def timeline(trace: Trace, label: str, world: int | None = None) -> dict[str, Any]:
    """The spans of the first ranks, in ticks; one number stands for ranks that agree."""
    shown = min(RANKS, trace.world)
    names = list(dict.fromkeys(span.name for span in trace.spans))
    kinds = list(dict.fromkeys(span.kind for span in trace.spans))
    seconds = trace.seconds
    scale = TICKS / seconds if seconds > 1e-12 else 0.0
    spans = [
        [
            names.index(span.name),
            kinds.index(span.kind),
            LANES.index(span.lane),
            _ticks(span.starts[:shown], scale),
            _ticks(span.seconds[:shown], scale),
        ]
        for span in trace.spans
        if (span.seconds[:shown] > 0).any()
    ]
    return {
        "label": label,
        "world": world or trace.world,
        "shown": shown,
        "seconds": seconds,
        "ticks": TICKS,
        "lanes": LANES,
        "names": names,
        "kinds": kinds,
        "spans": spans,
        "busy": _rounded(trace.busy[:shown]),
        "exposed": _rounded(trace.exposed[:shown]),
        "communication": _rounded(trace.communication[:shown]),
        "overlap": trace.overlap,
    }


def _ticks(seconds: np.ndarray, scale: float) -> int | list[int]:
    ticks = [round(float(second) * scale) for second in seconds]
    return ticks[0] if len(set(ticks)) == 1 else ticks


def _rounded(seconds: Iterable[float]) -> list[float]:
    return [short(float(second)) for second in seconds]


def short(number: float, digits: int = 4) -> float:
    """As many digits as a person reads, and a third of the bytes.

    >>> short(0.123456)
    0.1235
    """
    return float(f"{number:.{digits}g}")


def shortened(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is said by these names, every number that is not whole with few digits."""
    changed = {name: short(value) for name, value in data.items() if isinstance(value, float)}
    changed |= {name: shortened(part) for name, part in data.items() if isinstance(part, Mapping)}
    return {**data, **changed}


def per_layer(trace: Trace, layers: Iterable[str]) -> dict[str, list[float]]:
    """Seconds that a rank spends on each layer, mean over ranks: see `PARTS`.

    What belongs to no single layer (sums over many, the optimizer) is listed by its kind.
    """
    known = set(layers)
    found: dict[str, list[float]] = {}
    for span in trace.spans:
        layer = PURPOSE.sub("", span.name)
        if span.kind in WHOLE or layer not in known:
            layer = OTHERS.get(span.kind, "other")
        row = found.setdefault(layer, [0.0] * len(PARTS))
        row[_part(span)] += _seconds(span)
    return {name: [short(seconds) for seconds in row] for name, row in found.items()}


def _part(span: Span) -> int:
    if span.blocked is not None:
        return PARTS.index("communication")
    own = {"copy": "copy", "backward": "backward", "update": "backward"}
    return PARTS.index(own.get(span.kind, "forward"))


def _seconds(span: Span) -> float:
    """What the rank lost: communication that is hidden costs nothing."""
    return float(np.mean(span.seconds if span.blocked is None else span.blocked))
