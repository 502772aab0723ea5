"""What a run says: lines of metrics in its folder, and bars or lines on the terminal."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from math import isfinite

import torch

from shardwise.plans.trace import Trace

from .progress import ProgressBars
from .run_folder import RunFolder


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to."""

    number: int
    loss: float
    test_loss: float | None
    accuracy: float | None  # on the test samples, 0 to 1
    samples_per_second: float

    def __str__(self) -> str:
        tested = "" if self.accuracy is None else f"  test accuracy {100 * self.accuracy:.2f} %"
        return (
            f"epoch {self.number:3d}  loss {self.loss:.4f}{tested}  "
            f"{self.samples_per_second:.0f} samples/s"
        )


class Journal:
    """The run's folder and its view, which hear of the same things."""

    def __init__(self, folder: RunFolder, view: ProgressBars) -> None:
        self.folder, self.view = folder, view

    def step(self, step: int, loss: float, lr: float, rate: float) -> None:
        self.folder.add(
            step=step, loss=loss if isfinite(loss) else None, lr=lr, samples_per_second=rate
        )

    def traced(self, step: int, trace: Trace) -> None:
        """A step was written down: its trace is for the report, its waits are for everybody."""
        exposed, seconds = float(trace.exposed.mean()), float(trace.seconds)
        self.folder.save_trace(trace)
        self.folder.add(
            step=step, exposed_seconds=exposed, overlap=float(trace.overlap), step_seconds=seconds
        )
        self.view.exposed(exposed, seconds)

    def epoch(self, step: int, epoch: Epoch, memory: list[int]) -> None:
        tested = {"test_loss": epoch.test_loss, "accuracy": epoch.accuracy}
        self.folder.add(
            step=step,
            epoch=epoch.number,
            epoch_loss=epoch.loss,
            memory_bytes=memory,
            **{name: value for name, value in tested.items() if value is not None},
        )
        self.view.epoch_done(epoch.number, str(epoch), epoch.accuracy)


def memory_held(device: torch.device) -> int:
    """Bytes this rank has held at most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
