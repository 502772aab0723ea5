"""Tables for people: plans, alternatives, simulations and comparisons."""

from __future__ import annotations

import numpy as np
from rich.markup import escape
from rich.table import Table

from shardwise.planner.best_plan import size
from shardwise.planner.costs import usual
from shardwise.planner.planned import Findings
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.verify.results import KindResult, PlanResult, limit_of

ALTERNATIVES = 12  # shown of one layer


def milliseconds(seconds: float) -> str:
    """A time in ms with four digits, 0 for nothing.

    >>> milliseconds(0.0168), milliseconds(1.0754), milliseconds(0.0)
    ('16.8', '1075', '0')
    """
    value = 1e3 * seconds
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def plan_table(plan: Plan) -> Table:
    """Every layer with its split and its predicted costs."""
    findings: Findings = plan.findings
    rows = findings.prediction.rows
    table = Table(title=f"plan for {plan.world} workers", title_justify="left")
    for name in ("layer", "operator", "split"):
        table.add_column(name)
    for name in ("workers", "compute ms", "transfer ms", "update ms", "moved", "memory"):
        table.add_column(name, justify="right")
    for row in rows:
        note = " (no strategy)" if row.layer in plan.whole else ""
        table.add_row(
            escape(row.layer),
            row.op,
            f"{row.config}{note}" if row.op != "gather" else "all ranks",
            str(row.config.num_workers if row.op != "gather" else plan.world),
            *(milliseconds(t) for t in (row.compute, row.transfer, row.update)),
            size(row.moved) if row.moved else "",
            size(row.memory) if row.memory else "",
        )
    return table


def rivals_table(plan: Plan) -> Table:
    """The plan's totals next to what uniform plans would cost."""
    findings: Findings = plan.findings
    mine = findings.prediction
    table = Table(title="compared with", title_justify="left")
    table.add_column("plan")
    table.add_column("degrees")
    names = ("compute ms", "transfer ms", "update ms", "cost ms", "step ms", "moved", "memory")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("slower", justify="right")
    rows = [("this plan", "", mine, findings.trace.seconds)]
    rows += [
        (name, rival.plan.main_split, rival.prediction, rival.step)
        for name, rival in findings.rivals.items()
    ]
    for name, degrees, prediction, step in rows:
        slower = step / findings.trace.seconds if step else prediction.seconds / mine.seconds
        table.add_row(
            name,
            degrees,
            *map(
                milliseconds,
                (prediction.compute, prediction.transfer, prediction.update, prediction.seconds),
            ),
            milliseconds(step) if step else "",
            size(prediction.moved),
            size(prediction.memory),
            f"{slower:.2f}x",
        )
    return table


def explain_table(plan: Plan, layer: str) -> Table:
    """The alternatives for a layer: the best ones, the chosen one and the pure splits."""
    findings: Findings = plan.findings
    found = findings.explain(layer)
    chosen = usual(findings.costs.graph[layer], plan.layers[layer])
    shown = [a for i, a in enumerate(found) if i < ALTERNATIVES or a.config == chosen or a.is_pure]
    table = Table(title=escape(f"alternatives for {layer}"), title_justify="left")
    table.add_column("split")
    names = ("workers", "transfer ms", "compute ms", "update ms", "onward ms", "total ms")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("")
    for a in shown:
        table.add_row(
            str(a.config),
            str(a.config.num_workers),
            *map(milliseconds, (a.transfer, a.compute, a.update, a.onward, a.total)),
            "chosen" if a.config == chosen else "",
        )
    return table


def trace_lines(trace: Trace) -> list[str]:
    """A simulated or measured step in a few lines."""
    busy, waiting = trace.busy, trace.waiting
    lines = [
        f"step {milliseconds(trace.seconds)} ms on {trace.world} workers",
        f"computing {_range(busy)} ms a rank, waiting {_range(waiting)} ms",
        f"communication {_range(trace.communication)} ms a rank, exposed "
        f"{_range(trace.exposed)} ms, overlap {100 * trace.overlap:.1f} %",
    ]
    return lines


def _range(seconds: np.ndarray) -> str:
    low, high = milliseconds(float(seconds.min())), milliseconds(float(seconds.max()))
    return low if low == high else f"{low} to {high}"


def verify_table(result: PlanResult) -> Table:
    """The worst tensor of every kind: its error, the noise of one device, and the limit."""
    table = Table(title=escape(result.label), title_justify="left")
    table.add_column("compared")
    table.add_column("tensors", justify="right")
    table.add_column("worst tensor")
    for name in ("relative error", "noise", "limit"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in result.by_kind():
        worst = row.worst
        noise = "" if worst.noise is None else f"{worst.noise:.1e}"
        cells = (f"{worst.error:.1e}", noise, limit_of(worst), _verdict(row))
        table.add_row(row.kind, str(row.num_tensors), escape(worst.name), *cells)
    return table


def _verdict(row: KindResult) -> str:
    if not row.passed:
        return "[bold red]FAILED"
    return f"[green]ok[/], {row.num_undetermined} open" if row.num_undetermined else "[green]ok"
