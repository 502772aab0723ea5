"""What one plan costs more than another, by layer and kind of cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from shardwise.planner.best_plan import PlannedLayer, Prediction, size
from shardwise.planner.shown_plan import TIMES, columns, milliseconds, new_table

if TYPE_CHECKING:
    from shardwise.planner.planned import Findings

SHOWN = 20  # layers of a difference that are shown, those that change most
NOTHING = 1e-12  # seconds that are rounding


@dataclass(frozen=True)
class LayerDifference:
    """A layer under two plans, and what the second costs more; seconds and bytes."""

    layer: str
    before: str  # its splits
    after: str
    compute: float
    transfer: float
    update: float
    moved: int
    memory: int

    @classmethod
    def between(cls, before: PlannedLayer, after: PlannedLayer) -> LayerDifference:
        parts = (*TIMES, "moved", "memory")
        more = (getattr(after, part) - getattr(before, part) for part in parts)
        old, new = ("" if row.op == "gather" else str(row.config) for row in (before, after))
        return cls(before.layer, old, new, *more)

    @property
    def total(self) -> float:
        return self.compute + self.transfer + self.update

    @property
    def counts(self) -> bool:
        """Whether anything of it differs."""
        times = max(abs(getattr(self, part)) for part in TIMES)
        return self.before != self.after or times > NOTHING or self.moved != 0 or self.memory != 0


@dataclass(frozen=True)
class PlanTotals:
    """What a plan costs in all: seconds and bytes."""

    compute: float
    transfer: float
    update: float
    step: float  # simulated
    moved: int
    memory: int  # of the fullest worker

    @classmethod
    def of(cls, prediction: Prediction, step_seconds: float) -> PlanTotals:
        times = prediction.compute, prediction.transfer, prediction.update
        return cls(*times, step_seconds, prediction.moved, prediction.memory)

    @property
    def cost(self) -> float:
        return self.compute + self.transfer + self.update


@dataclass(frozen=True)
class PlanDifference:
    """The layers that differ between two plans, and what both cost in all.

    What is more under the second plan is positive.
    """

    layers: tuple[LayerDifference, ...]
    before: PlanTotals
    after: PlanTotals

    @classmethod
    def between(cls, before: Findings, after: Findings) -> PlanDifference:
        """Of two plans of one model, each with its costs."""
        known = {row.layer: row for row in after.prediction.rows}
        pairs = ((row, known[row.layer]) for row in before.prediction.rows if row.layer in known)
        rows = (LayerDifference.between(*pair) for pair in pairs)
        totals = (PlanTotals.of(each.prediction, each.trace.seconds) for each in (before, after))
        return cls(tuple(row for row in rows if row.counts), *totals)

    @property
    def changed(self) -> list[str]:
        """The layers whose split differs."""
        return [row.layer for row in self.layers if row.before != row.after]

    @property
    def total(self) -> float:
        return self.after.cost - self.before.cost

    def data(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    def kinds(self) -> str:
        """What is more and less, by kind, in a few words."""
        more = {part: getattr(self.after, part) - getattr(self.before, part) for part in TIMES}
        return ", ".join(f"{part} {signed(value)}" for part, value in more.items())

    def lines(self) -> list[str]:
        """What both cost in all."""
        pairs = (
            (what, getattr(self.before, what), getattr(self.after, what))
            for what in ("cost", "step")
        )
        times = [
            f"{what} {milliseconds(a)} ms, then {milliseconds(b)} ms ({share(a, b)})"
            for what, a, b in pairs
            if a or b
        ]
        sizes = [
            f"{what} {size(getattr(self.before, what))}, then {size(getattr(self.after, what))}"
            for what in ("moved", "memory")
        ]
        same = [] if self.layers else ["no layer differs"]
        return [*same, *times, "; ".join(sizes)]

    def __str__(self) -> str:
        table = [columns([difference_table(self, box=None)])] if self.layers else []
        return "\n".join([*table, *self.lines()])


def difference_table(difference: PlanDifference, **options: Any) -> Any:
    """The layers that change most, in the model's order, the others as one row, and their sum."""
    numbers = (*(f"{part} ms" for part in (*TIMES, "total")), "memory")
    table = new_table("what is more", ("layer", "before", "after"), numbers, **options)
    rows = difference.layers
    weight = {row.layer: (abs(row.total), row.before != row.after) for row in rows}
    most = set(sorted(weight, key=lambda name: weight[name], reverse=True)[:SHOWN])
    for row in rows:
        if row.layer in most:
            after = row.after if row.after != row.before else ""
            table.add_row(escape(row.layer), row.before, after, *_more([row]))
    others = [row for row in rows if row.layer not in most]
    if others:
        table.add_row(f"{len(others)} more layers", "", "", *_more(others))
    table.add_row(f"all {len(rows)} layers that differ", "", "", *_more(rows))
    return table


def _more(rows: Iterable[LayerDifference]) -> list[str]:
    rows = list(rows)
    times = [signed(sum(getattr(row, part) for row in rows)) for part in (*TIMES, "total")]
    memory = sum(row.memory for row in rows)
    return [*times, f"{'-' if memory < 0 else '+'}{size(abs(memory))}" if memory else ""]


def signed(seconds: float) -> str:
    """Milliseconds with their sign.

    >>> signed(0.0125), signed(-3e-6), signed(0.0)
    ('+12.5', '-0.003', '0')
    """
    if abs(seconds) <= NOTHING:
        return "0"
    return ("-" if seconds < 0 else "+") + milliseconds(abs(seconds))


def share(before: float, after: float) -> str:
    """The change as a share.

    >>> share(2.0, 2.1), share(2.0, 1.0)
    ('+5.00 %', '-50.00 %')
    """
    return f"{100 * (after / before - 1):+.2f} %" if before else "new"
