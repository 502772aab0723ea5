"""Times every kernel on a layer, direction by direction, and remembers (P5's mixed strategy)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter

from shardwise.files import TimesFile
from shardwise.kernels import checks, dispatch
from shardwise.kernels.checks import settings
from shardwise.kernels.conv_shape import ConvShape, memory_format, shape_of
from shardwise.kernels.dispatch import (
    INEXACT,
    STOCK,
    KernelChoice,
    Settings,
    kernels_for,
    workspace_bytes,
)
from shardwise.kernels.native import DIRECTIONS, library
from shardwise.kernels.ops import convolve

Times = dict[str, float]  # seconds by kernel
CPU = ("cpu family", "model\t", "model name", "stepping")  # what tells CPUs apart
MEMORY_BYTES = 1 << 30  # of workspace, unless a limit is given
ROUNDS = 3
HOPELESS = 2.0  # times slower than the best: not timed again
TRIAL = 4.0  # the same on a few samples, where what is done once (to the filters) weighs more
LARGE = 500_000_000  # operations: worth a trial on a few samples first
MARGIN = 0.97  # the stock operator is left only for a kernel that is surely faster


@cache
def cpu_name(keys: tuple[str, ...] = CPU) -> str:
    """What the system says of the CPU."""
    found: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = [line.split(":")[1].strip() for line in lines if line.startswith(keys)]
    return " ".join(found[: len(keys)]) or platform.processor() or platform.machine()


@dataclass
class Winners(TimesFile):
    """What was timed, by shape, direction and kernel, on this CPU with so many threads.

    The fastest kernel is looked up, not stored, since limits may change.
    """

    threads: int
    cpu: str = field(default_factory=cpu_name)

    format = "shardwise-kernels-1"
    kind = TypeAdapter(dict[str, dict[str, dict[str, Annotated[float, Field(gt=0, lt=inf)]]]])
    what, remedy, raises = "times of kernels", "kernels are timed anew", False

    @property
    def name(self) -> str:
        lib = library()
        isa = lib.isa if lib is not None else "stock"
        return f"kernels {self.cpu} {isa} {self.threads} threads torch {torch.__version__}"

    def times(self, shape: ConvShape, direction: str) -> Times:
        return self.seconds.get(shape.key, {}).get(direction, {})

    def errors(self, shape: ConvShape, direction: str) -> dict[str, float]:
        """By kernel, in the units of `checks`; they lie beside the times, in the same file."""
        return self.seconds.get(shape.key, {}).get(f"{direction} errors", {})


class Tuner:
    """Chooses kernels by what was timed on this CPU with this number of threads."""

    def __init__(
        self,
        memory_bytes: int | None = MEMORY_BYTES,
        exact: bool = False,
        winners: Winners | None = None,
    ) -> None:
        self.memory_bytes, self.exact = memory_bytes, exact
        self.winners = winners or Winners.load(torch.get_num_threads())
        self._choices: dict[ConvShape, KernelChoice] = {}

    def known(self, shape: ConvShape) -> KernelChoice:
        """The fastest kernels among those timed; the stock operator where none was."""
        if shape not in self._choices:
            self._choices[shape] = KernelChoice(*(self._best(shape, d) for d in DIRECTIONS))
        return self._choices[shape]

    def _best(self, shape: ConvShape, direction: str) -> str:
        times = self.winners.times(shape, direction)
        wrong = checks.wrong(self.winners.errors(shape, direction))
        allowed = [n for n in times if n not in wrong and self._fits(n, direction, shape)]
        if STOCK in wrong:
            return min(allowed, key=times.__getitem__, default=checks.JUDGES[direction])
        best = min(allowed, key=times.__getitem__, default=STOCK)
        return best if times.get(best, inf) <= MARGIN * times.get(STOCK, inf) else STOCK

    def _fits(self, kernel: str, direction: str, shape: ConvShape) -> bool:
        """Whether a kernel takes this shape inside the limits; the stock operator always does."""
        needed = workspace_bytes(kernel, direction, shape, self.winners.threads)
        roomy = self.memory_bytes is None or needed <= self.memory_bytes
        return needed >= 0 and roomy and not (self.exact and kernel in INEXACT)

    def candidates(self, shape: ConvShape, direction: str) -> list[str]:
        """Every kernel that may be chosen, the stock operator first."""
        return [name for name in kernels_for(direction) if self._fits(name, direction, shape)]

    def tune(self, shape: ConvShape, directions: Iterable[str] = DIRECTIONS) -> KernelChoice:
        """Times what has not been timed yet on random numbers, and checks it, then chooses."""
        missing = {d: self._missing(shape, d) for d in directions}
        unchecked = [d for d in missing if library() and not self.winners.errors(shape, d)]
        if unchecked or any(missing.values()):
            tensors = random_tensors(shape)
            for direction, names in missing.items():
                if names:
                    self._time(shape, direction, names, tensors)
            known = self.winners.seconds.setdefault(shape.key, {})
            for direction in unchecked:
                known[f"{direction} errors"] = checks.errors(shape, direction, tensors)
            self.winners.save()
            self._choices.pop(shape, None)
        return self.known(shape)

    def _missing(self, shape: ConvShape, direction: str) -> list[str]:
        known = self.winners.times(shape, direction)
        names = [name for name in self.candidates(shape, direction) if name not in known]
        return [STOCK, *names] if names and STOCK not in names else names

    def _time(
        self, shape: ConvShape, direction: str, names: list[str], tensors: tuple[torch.Tensor, ...]
    ) -> None:
        """Of kernels that are far behind on a few samples, that is the time that is kept."""
        record = self.winners.seconds.setdefault(shape.key, {}).setdefault(direction, {})
        x, w, dy = tensors
        few, how = -(-x.shape[0] // 8), settings(shape)
        if shape.flops >= LARGE and few < x.shape[0]:
            sample = (x[:few], w, dy[:few])
            trial = interleaved({n: call(direction, n, how, *sample) for n in names}, rounds=1)
            limit = TRIAL * min(trial.values())
            record.update({n: t * x.shape[0] / few for n, t in trial.items() if t > limit})
            names = [name for name in names if trial[name] <= limit]
        record.update(interleaved({n: call(direction, n, how, *tensors) for n in names}))


def random_tensors(shape: ConvShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and dy of a shape, in its layout; the numbers of torch's generator are not used up."""
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, shape.dtype)
    sizes = ((shape.x, shape.last), (shape.w, shape.filter_last), (shape.out, shape.last))
    x, w, dy = (
        torch.empty(size, dtype=dtype, memory_format=memory_format(last, len(size))).normal_(
            generator=generator
        )
        for size, last in sizes
    )
    return x, w, dy


def call(
    direction: str,
    kernel: str,
    how: Settings,
    x: torch.Tensor,
    w: torch.Tensor,
    dy: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    """One direction of one convolution, ready to be timed."""
    if direction == "fwd":
        return lambda: dispatch.forward(x, w, None, how, kernel)
    return lambda: dispatch.backward(direction, dy, x, w, how, kernel)


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> Times:
    """The least seconds of each call: others on the machine only add to it. Calls take turns, since
    a machine's speed drifts.

    The first round warms up: it also touches memory for the first time. Calls that are far behind
    the best after the second one are not made again.
    """
    times = {name: [seconds(function)] for name, function in calls.items()}
    for turn in range(rounds):
        limit = HOPELESS * min(values[-1] for values in times.values())
        for name, values in times.items():
            if turn == 0 or values[-1] <= limit:
                values.append(seconds(calls[name]))
    return {name: min(values) for name, values in times.items()}


clock = time.perf_counter  # a benchmark on a busy machine may count the time of its one thread


def seconds(function: Callable[[], object]) -> float:
    start = clock()
    function()
    return clock() - start


# -- convolutions that look their kernels up -------------------------------------------------------

_tuners: dict[int, Tuner] = {}
_tuning = False


@contextmanager
def tuning() -> Iterator[None]:
    """Inside, convolutions run on the kernels that are fastest here; outside, on PyTorch's own.

    Shapes that were never timed on this machine are timed when they first run.
    """
    global _tuning
    before, _tuning = _tuning, True
    try:
        yield
    finally:
        _tuning = before


def tuner() -> Tuner:
    """The one of the present number of threads, without limits but the default ones."""
    threads = torch.get_num_threads()
    if threads not in _tuners:
        _tuners[threads] = Tuner()
    return _tuners[threads]


def convolution(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """PyTorch's own convolution; inside `tuning`, by the fastest kernels for its shape.

    What is on disk counts only inside `tuning`: other numbers than PyTorch's must be asked for.
    """
    if _tuning:
        how = (tuple(stride), tuple(padding), tuple(dilation), groups)
        shape = shape_of(x, w, *how)
        choice = KernelChoice() if shape is None else tuner().tune(shape)
        if not choice.stock:
            return convolve(x, w, bias, how, choice, False)
    return torch.convolution(x, w, bias, stride, padding, dilation, False, [0], groups)
