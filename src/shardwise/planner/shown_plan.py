"""How a plan is shown: as plain data, as tables, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.planner.best_plan import PlannedLayer, Prediction, size
from shardwise.planner.costs import usual
from shardwise.planner.optimality import Optimality
from shardwise.plans.plan import Plan

if TYPE_CHECKING:
    from shardwise.planner.planned import Alternative, Findings

TIMES = ("compute", "transfer", "update")
SIZES = ("moved_bytes", "memory_bytes")


def as_data(plan: Plan, explain: Sequence[str] = ()) -> dict[str, Any]:
    """A plan and all that is known about it as plain data, for JSON; alternatives if asked for."""
    findings: Findings = plan.findings
    sizes = {"sizes": [as_data(other) for other in plan.others]} if plan.others else {}
    return {
        "workers": plan.world,
        "cluster": findings.costs.cluster.name,
        "training": plan.training,
        "inputs": [list(shape) for shape in plan.inputs],
        **sizes,
        **_totals(findings.prediction, findings.trace.seconds),
        **_optimality_data(findings.optimality),
        "layers": [_layer_data(row) for row in findings.prediction.rows],
        "rivals": {
            name: {"split": rival.plan.main_split, **_totals(rival.prediction, rival.step_seconds)}
            for name, rival in findings.rivals.items()
        },
        "alternatives": {
            name: [
                {"split": str(found.config), "onward_seconds": found.onward, **_times(found)}
                for found in findings.explain(name)
            ]
            for name in explain
        },
    }


def notable_alternatives(
    findings: Findings, layer: str, num_best: int
) -> list[tuple[Alternative, bool]]:
    """The best alternatives for a layer, the pure splits and the chosen one; whether it is that."""
    found, graph = findings.explain(layer), findings.costs.graph
    chosen = usual(graph[layer], findings.plan.config(graph[layer], graph))
    return [
        (alternative, alternative.config == chosen)
        for place, alternative in enumerate(found)
        if place < num_best or alternative.config == chosen or alternative.is_pure
    ]


def _totals(prediction: Prediction, step_seconds: float) -> dict[str, Any]:
    return {
        "step_seconds": step_seconds,
        "cost_seconds": prediction.seconds,
        **_times(prediction),
        "moved_bytes": prediction.moved,
        "memory_bytes": prediction.memory,
    }


def _optimality_data(known: Optimality) -> dict[str, Any]:
    return {
        "bound_seconds": known.bound_seconds,
        "gap": known.gap if isfinite(known.gap) else None,
        "search_seconds": known.search_seconds,
        "optimality": str(known),
    }


def _layer_data(row: PlannedLayer) -> dict[str, Any]:
    return {
        "layer": row.layer,
        "op": row.op,
        "split": str(row.config),
        "workers": row.config.num_workers,
        **_times(row),
        "moved_bytes": row.moved,
        "memory_bytes": row.memory,
    }


def _times(costs: Any) -> dict[str, float]:
    """The parts of what something costs, in seconds."""
    return {f"{part}_seconds": getattr(costs, part) for part in TIMES}


def as_text(plan: Plan) -> str:
    """The plan and its rivals as plain columns."""
    return "\n".join([columns(tables(plan, box=None)), *remarks(plan)])


def remarks(plan: Plan) -> list[str]:
    """What is said below the tables: how good it is, and who has nothing to do."""
    return [str(plan.findings.optimality), *plan.idle()]


def columns(tables: Sequence[Table]) -> str:
    """Tables as plain text."""
    console = Console(file=StringIO(), width=1000, color_system=None, highlight=False)
    with console.capture() as captured:
        for table in tables:
            console.print(table, "")
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def tables(plan: Plan, box: Box | None = HEAVY_HEAD) -> list[Table]:
    """The layers, the rivals, and where it was planned for several sizes these."""
    sizes = [sizes_table(plan, box)] if plan.others else []
    return [plan_table(plan, box), rivals_table(plan, box), *sizes]


def new_table(title: str, texts: Sequence[str], numbers: Sequence[str], **options: Any) -> Table:
    """A table with columns of text, then some of numbers."""
    table = Table(*texts, title=title, title_justify="left", **options)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def plan_table(plan: Plan, box: Box | None = HEAVY_HEAD) -> Table:
    """Every layer with its split and its predicted costs."""
    data = as_data(plan)
    title = escape(f"plan for {plan.world} workers of {data['cluster']}")
    numbers = ("workers", *(f"{part} ms" for part in TIMES), "moved", "memory")
    table = new_table(title, ("layer", "operator", "split"), numbers, box=box)
    recipients = "rank 0" if plan.findings.costs.training.output == "one" else "all ranks"
    for row in data["layers"]:
        note = " (no strategy)" if row["layer"] in plan.whole else ""
        gathered = row["op"] == "gather"
        table.add_row(
            escape(row["layer"]),
            row["op"],
            recipients if gathered else row["split"] + note,
            str(plan.world if gathered else row["workers"]),
            *(milliseconds(row[f"{part}_seconds"]) for part in TIMES),
            *(size(row[part]) if row[part] else "" for part in SIZES),
        )
    return table


def rivals_table(plan: Plan, box: Box | None = HEAVY_HEAD) -> Table:
    """The plan's totals next to what uniform plans would cost."""
    data = as_data(plan)
    times = tuple(f"{part}_seconds" for part in (*TIMES, "cost"))
    numbers = (*(f"{part} ms" for part in (*TIMES, "cost", "step")), "moved", "memory", "slower")
    table = new_table("compared with", ("plan", "degrees"), numbers, box=box)
    for name, row in {"this plan": {**data, "split": ""}, **data["rivals"]}.items():
        judged = "step_seconds" if row["step_seconds"] else "cost_seconds"
        table.add_row(
            name,
            row["split"],
            *(milliseconds(row[part]) for part in times),
            milliseconds(row["step_seconds"]) if row["step_seconds"] else "",
            *(size(row[part]) for part in SIZES),
            f"{row[judged] / data[judged]:.2f}x",
        )
    return table


def sizes_table(plan: Plan, box: Box | None = HEAVY_HEAD) -> Table:
    """What the plan of every size costs, and what it would cost on one worker."""
    numbers = ("step ms", "one worker ms", "moved", "memory")
    table = new_table("every size", ("input", "split of most layers"), numbers, box=box)
    for each in (plan, *plan.others):
        data = as_data(each)
        alone = data["rivals"].get("one worker", {}).get("step_seconds")
        table.add_row(
            ", ".join("x".join(map(str, shape)) for shape in each.inputs),
            each.main_split,
            milliseconds(data["step_seconds"]),
            "" if alone is None else milliseconds(alone),
            *(size(data[part]) for part in SIZES),
        )
    return table


def milliseconds(seconds: float) -> str:
    """A time in ms with four digits, 0 for nothing.

    >>> milliseconds(0.0168), milliseconds(1.0754), milliseconds(2e-19)
    ('16.8', '1075', '0')
    """
    value = round(1e3 * seconds, 9)  # sums leave something of their rounding
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
