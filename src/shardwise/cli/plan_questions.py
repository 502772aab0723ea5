"""What `shardwise plan` is asked about a plan: alternatives, splits it has not, another plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.cli.tables import explain_table, trace_lines
from shardwise.geometry.split_text import parse_layer_split
from shardwise.planner.plan_difference import PlanDifference, difference_table
from shardwise.planner.shown_plan import as_data, remarks, tables
from shardwise.planner.why_not import WhyNot
from shardwise.plans.plan import Plan


@dataclass(frozen=True)
class Questions:
    """Layers to explain, splits of layers to force, and a plan file to compare with."""

    explain: Sequence[str]
    why_not: Sequence[tuple[str, str]]
    diff: Path | None

    def answers(self, plan: Plan) -> Answers:
        other = None if self.diff is None else Plan.load(self.diff)
        return Answers(
            plan,
            self.explain,
            tuple(plan.why_not(layer, split) for layer, split in self.why_not),
            None if other is None else plan.diff(other),
        )


@dataclass(frozen=True)
class Answers:
    """A plan, and what it says about itself."""

    plan: Plan
    explain: Sequence[str]
    why_not: tuple[WhyNot, ...]
    diff: PlanDifference | None

    def data(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        more = {"why_not": [answer.data() for answer in self.why_not]}
        diff = {} if self.diff is None else {"diff": self.diff.data()}
        return as_data(self.plan, self.explain) | more | diff

    def show(self, console: Console) -> None:
        """The answers; without questions, the plan."""
        for layer in self.explain:
            console.print(explain_table(self.plan, layer))
        for answer in self.why_not:
            console.print(answer.sentence, soft_wrap=True, markup=False)
            _show_difference(console, answer.difference)
        _show_difference(console, self.diff)
        if not (self.explain or self.why_not or self.diff):
            console.print(*tables(self.plan))
        for line in [*trace_lines(self.plan.findings.trace), *remarks(self.plan)]:
            console.print(line, soft_wrap=True, markup=False)


def _show_difference(console: Console, difference: PlanDifference | None) -> None:
    if difference is None:
        return
    if difference.layers:
        console.print(difference_table(difference))
    for line in difference.lines():
        console.print(line, soft_wrap=True, markup=False)


def layer_splits(texts: Iterable[str] | None) -> list[tuple[str, str]]:
    """Layers and splits of options such as conv1=h=4."""
    return [parse_layer_split(text) for text in texts or ()]
