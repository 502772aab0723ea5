"""`shardwise kernels`: every kernel's rate on every layer and direction, as in P5's Table 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from shardwise.errors import ShardwiseError
from shardwise.kernels.accelerate import convolutions
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import KERNELS, STOCK
from shardwise.kernels.native import DIRECTIONS
from shardwise.kernels.tuner import MEMORY_BYTES, Tuner
from shardwise.planner.shown_plan import new_table
from shardwise.specs.model_spec import ModelSpec
from shardwise.units import parse_size

COLUMNS = (STOCK, *dict.fromkeys(name for names in KERNELS.values() for name in sorted(names)))
LAYOUTS = ("keep", "channels_last")
DEFAULT_BATCH = 64  # samples, where neither these nor a shape are given


@dataclass(frozen=True)
class KernelRequest:
    """What is to be timed: a model, threads and limits."""

    spec: ModelSpec
    threads: int | None = None
    layout: str = "keep"
    memory: str | None = None
    exact: bool = False


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
    asked: KernelRequest, report: Callable[[str], None] | None = None
) -> list[KernelRow]:
    """Times, or looks up, every kernel on every convolution of a model."""
    if asked.layout not in LAYOUTS:
        raise ShardwiseError(f"layout {asked.layout!r} is not one of {', '.join(LAYOUTS)}")
    if asked.threads is not None and asked.threads < 1:
        raise ShardwiseError(f"{asked.threads} threads: at least 1 is needed")
    before = torch.get_num_threads()
    torch.set_num_threads(asked.threads or before)
    try:
        return _time(asked, report)
    finally:
        torch.set_num_threads(before)


def _time(asked: KernelRequest, report: Callable[[str], None] | None) -> list[KernelRow]:
    model = asked.spec.build()
    x = torch.randn(asked.spec.input_shapes(DEFAULT_BATCH)[0])
    if asked.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    memory = MEMORY_BYTES if asked.memory is None else parse_size(asked.memory)
    tuner, rows = Tuner(memory, asked.exact), []
    for seen in convolutions(model, x):
        if report is not None:
            report(seen.name)
        directions = [d for d in DIRECTIONS if d != "dx" or not seen.first]
        choice = tuner.tune(seen.shape, directions)
        for direction in directions:
            times = tuner.winners.times(seen.shape, direction)
            rows.append(
                KernelRow(seen.name, seen.shape, direction, times, getattr(choice, direction))
            )
    return rows


def kernel_table(title: str, rows: list[KernelRow]) -> Table:
    """Gflop/s, the chosen kernel of each row marked."""
    used = [name for name in COLUMNS if any(name in row.seconds for row in rows)]
    kernels = [name.replace("_", " ") for name in used]
    table = new_table(f"{title}: Gflop/s", ("layer", "input", "filters", ""), kernels)
    previous = None
    for row in rows:
        head = (row.layer, _sizes(row.shape.x), _sizes(row.shape.w))
        shown = head if head != previous else ("", "", "")
        previous = head
        table.add_row(*map(escape, shown), row.direction, *(_cell(row, name) for name in used))
    return table


def _cell(row: KernelRow, kernel: str) -> str:
    rate = row.gflops(kernel)
    text = "" if rate is None else f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"
    return f"[bold green]*{text}[/]" if kernel == row.choice else text


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
