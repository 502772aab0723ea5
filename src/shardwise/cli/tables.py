"""Tables for people: alternatives, simulations, comparisons, and the rates of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table

from shardwise.errors import ShardwiseError
from shardwise.kernels.accelerate import Seen, convolutions
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import KERNELS, STOCK
from shardwise.kernels.native import DIRECTIONS
from shardwise.kernels.tuner import MEMORY_BYTES, Tuner
from shardwise.planner.shown_plan import milliseconds, new_table, notable_alternatives
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.specs.model_spec import ModelSpec
from shardwise.units import parse_size
from shardwise.verify.results import PlanResult, limit_of, worst_of

ALTERNATIVES = 12  # shown of one layer
COLUMNS = (STOCK, *dict.fromkeys(name for names in KERNELS.values() for name in sorted(names)))
LAYOUTS = {"keep": torch.contiguous_format, "channels_last": torch.channels_last}
DEFAULT_BATCH = 64  # samples, where neither these nor a shape are given


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
    for kind, group in result.by_kind().items():
        worst, num_open = worst_of(group), sum(c.undetermined for c in group)
        noise = "" if worst.noise is None else f"{worst.noise:.1e}"
        verdict = f"[green]ok[/], {num_open} open" if num_open else "[green]ok"
        verdict = verdict if worst.passed else "[bold red]FAILED"
        cells = (f"{worst.error:.1e}", noise, limit_of(worst), verdict)
        table.add_row(kind, str(len(group)), escape(worst.name), *cells)
    return table


# -- kernels: every one on every layer and direction, as in P5's Table 2 ---------------------------


@dataclass(frozen=True)
class KernelRow:
    """One direction of one layer: seconds by kernel, and the kernel that is chosen."""

    layer: str
    shape: ConvShape
    direction: str
    seconds: dict[str, float]
    choice: str

    def gflops(self, kernel: str) -> float | None:
        """Gflop/s, counted as a plain sum of products for every kernel."""
        taken = self.seconds.get(kernel)
        return None if taken is None else self.shape.flops / taken / 1e9

    def data(self) -> dict[str, Any]:
        rates = {kernel: self.gflops(kernel) for kernel in self.seconds}
        return {
            "layer": self.layer,
            "direction": self.direction,
            "shape": self.shape.key,
            "gflops": rates,
            "choice": self.choice,
        }


def time_kernels(
    spec: ModelSpec,
    threads: int | None,
    layout: str,
    memory: str | None,
    exact: bool,
    report: Callable[[str], None],
) -> list[KernelRow]:
    """Times, or looks up, every kernel on every convolution of a model."""
    if layout not in LAYOUTS:
        raise ShardwiseError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if threads is not None and threads < 1:
        raise ShardwiseError(f"{threads} threads: at least 1 is needed")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        model, x = spec.build(), torch.randn(spec.input_shapes(DEFAULT_BATCH)[0])
        x = x.contiguous(memory_format=LAYOUTS[layout])
        tuner = Tuner(MEMORY_BYTES if memory is None else parse_size(memory), exact)
        return [row for seen in convolutions(model, x) for row in _timed(seen, tuner, report)]
    finally:
        torch.set_num_threads(before)


def _timed(seen: Seen, tuner: Tuner, report: Callable[[str], None]) -> list[KernelRow]:
    report(seen.name)
    directions = [d for d in DIRECTIONS if d != "dx" or not seen.first]
    choice, winners = tuner.tune(seen.shape, directions), tuner.winners
    return [
        KernelRow(seen.name, seen.shape, d, winners.times(seen.shape, d), getattr(choice, d))
        for d in directions
    ]


def kernel_table(title: str, rows: list[KernelRow]) -> Table:
    """Gflop/s, the chosen kernel of each row marked."""
    used = [name for name in COLUMNS if any(name in row.seconds for row in rows)]
    kernels = [name.replace("_", " ") for name in used]
    table = new_table(f"{title}: Gflop/s", ("layer", "input", "filters", ""), kernels)
    previous = None
    for row in rows:
        sizes = ("x".join(map(str, shape)) for shape in (row.shape.x, row.shape.w))
        head = (row.layer, *sizes)
        shown = head if head != previous else ("", "", "")
        previous = head
        table.add_row(*map(escape, shown), row.direction, *(_cell(row, name) for name in used))
    return table


def _cell(row: KernelRow, kernel: str) -> str:
    rate = row.gflops(kernel)
    text = "" if rate is None else f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"
    return f"[bold green]*{text}[/]" if kernel == row.choice else text
