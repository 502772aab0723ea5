"""A paper's published figures, ours next to them, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).parent
GOAL = 0.15


@dataclass(frozen=True)
class Figure:
    """One published number, and what we compute for it."""

    id: str
    what: str
    theirs: float
    ours: float
    unit: str = ""
    reason: str = ""  # where we are further off than the goal

    @property
    def error(self) -> float:
        return self.ours / self.theirs - 1.0 if self.theirs else self.ours

    @property
    def within(self) -> bool:
        return bool(abs(self.error) <= GOAL)

    def as_data(self) -> dict[str, Any]:
        fields = {"id": self.id, "what": self.what, "theirs": self.theirs, "ours": self.ours}
        more = {"unit": self.unit, "error": self.error, "within": self.within}
        return fields | more | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True)
class Paper:
    """What a paper publishes, from its data file."""

    name: str
    title: str
    machine: str
    assumed: tuple[str, ...]
    figures: tuple[dict[str, Any], ...]
    inputs: dict[str, Any]  # numbers of the paper or of a data sheet that go into the simulation

    @classmethod
    def load(cls, name: str) -> Paper:
        data = yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
        lists = {key: tuple(data[key]) for key in ("assumed", "figures")}
        return cls(name, data["title"], data["machine"], **lists, inputs=data.get("inputs", {}))

    def compare(self, ours: Mapping[str, float]) -> Result:
        """The published figures of which we have our own, in the order of the file."""
        unknown = set(ours) - {figure["id"] for figure in self.figures}
        assert not unknown, unknown
        found = [Figure(ours=float(ours[f["id"]]), **f) for f in self.figures if f["id"] in ours]
        return Result(self, tuple(found))


@dataclass(frozen=True)
class Result:
    """A paper's figures beside ours."""

    paper: Paper
    figures: tuple[Figure, ...]

    def show(self, console: Console) -> None:
        paper = self.paper
        table = Table(title=f"{paper.name.upper()}  {paper.title}", title_justify="left")
        for name in ("", "theirs", "ours", "error", ""):
            table.add_column(name, justify="right" if name else "left")
        for figure in self.figures:
            numbers = (f"{x:.4g}{figure.unit}" for x in (figure.theirs, figure.ours))
            note = "" if figure.within else "over 15 %"
            table.add_row(escape(figure.what), *numbers, f"{100 * figure.error:+.1f} %", note)
        console.print(table)
        console.print(f"  machine: {paper.machine}", highlight=False)
        self._list(console, "assumed", paper.assumed)
        reasons = dict.fromkeys(f.reason for f in self.figures if f.reason and not f.within)
        self._list(console, "why not closer", tuple(reasons))
        console.print()

    @staticmethod
    def _list(console: Console, title: str, lines: tuple[str, ...]) -> None:
        if lines:
            console.print(f"  {title}:")
        for line in lines:
            console.print(f"  - {escape(line)}", highlight=False, soft_wrap=True)

    def as_data(self) -> dict[str, Any]:
        paper = self.paper
        return {
            "paper": paper.name,
            "title": paper.title,
            "machine": paper.machine,
            "assumed": list(paper.assumed),
            "inputs": paper.inputs,
            "figures": [figure.as_data() for figure in self.figures],
        }
