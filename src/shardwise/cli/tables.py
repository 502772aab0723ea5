"""Tables for people: alternatives, simulations and comparisons."""

from __future__ import annotations

import numpy as np
from rich.markup import escape
from rich.table import Table

from shardwise.planner.shown_plan import milliseconds, new_table, notable_alternatives
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.verify.results import KindResult, PlanResult, limit_of

ALTERNATIVES = 12  # shown of one layer


def explain_table(plan: Plan, layer: str) -> Table:
    """The alternatives for a layer: the best ones, the chosen one and the pure splits."""
    names = ("workers", "transfer ms", "compute ms", "update ms", "onward ms", "total ms")
    table = new_table(escape(f"alternatives for {layer}"), ("split",), names)
    table.add_column("")
    for a, is_chosen in notable_alternatives(plan.findings, layer, ALTERNATIVES):
        table.add_row(
            str(a.config),
            str(a.config.num_workers),
            *map(milliseconds, (a.transfer, a.compute, a.update, a.onward, a.total)),
            "chosen" if is_chosen else "",
        )
    return table


def trace_lines(trace: Trace) -> list[str]:
    """A simulated or measured step in a few lines."""
    return [
        f"step {milliseconds(trace.seconds)} ms on {trace.world} workers",
        f"computing {_range(trace.busy)} ms a rank, waiting {_range(trace.waiting)} ms",
        f"communication {_range(trace.communication)} ms a rank, exposed "
        f"{_range(trace.exposed)} ms, overlap {100 * trace.overlap:.1f} %",
    ]


def _range(seconds: np.ndarray) -> str:
    low, high = milliseconds(float(seconds.min())), milliseconds(float(seconds.max()))
    return low if low == high else f"{low} to {high}"


def verify_table(result: PlanResult) -> Table:
    """The worst tensor of every kind: its error, the noise of one device, and the limit."""
    table = new_table(escape(result.label), ("compared",), ("tensors",))
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
