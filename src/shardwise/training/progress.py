"""What a run shows on the terminal: bars where there is one, else a line per epoch."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class ProgressBars:
    """Bars for epochs and steps with the latest figures; silent on all ranks but one."""

    def __init__(self, first: bool, epochs: int, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet or not first, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._epochs = self._bars.add_task("epochs", total=epochs, figures="")
        self._steps: TaskID | None = None
        self._exposed = ""

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def epoch(self, number: int, num_steps: int, done: int) -> None:
        """An epoch begins, some of whose steps may have been made before."""
        if self._steps is not None:
            self._bars.remove_task(self._steps)
        self._bars.update(self._epochs, completed=number - 1)
        self._steps = self._bars.add_task(
            f"epoch {number}", total=num_steps, completed=done, figures=""
        )

    def step(self, loss: float, samples_per_second: float) -> None:
        if self._steps is None or self._bars.disable:
            return
        figures = f"loss {loss:.4f}  {samples_per_second:.0f} samples/s{self._exposed}"
        self._bars.update(self._steps, advance=1, figures=figures)

    def exposed(self, seconds: float, step_seconds: float) -> None:
        """How long ranks waited for messages in a step that was written down."""
        share = 100 * seconds / step_seconds if step_seconds else 0.0
        self._exposed = f"  waits {share:.0f} %"

    def epoch_done(self, number: int, text: str, accuracy: float | None) -> None:
        figures = "" if accuracy is None else f"accuracy {100 * accuracy:.2f} %"
        self._bars.update(self._epochs, completed=number, figures=figures)
        self.say(text)


class Speed:
    """Samples per second."""

    def __init__(self) -> None:
        self._since, self._samples = time.perf_counter(), 0

    def add(self, num_samples: int) -> None:
        self._samples += num_samples

    def rate(self) -> float:
        return self._samples / max(time.perf_counter() - self._since, 1e-9)

    def take(self) -> float:
        """The rate, and begins anew."""
        rate = self.rate()
        self._since, self._samples = time.perf_counter(), 0
        return rate
