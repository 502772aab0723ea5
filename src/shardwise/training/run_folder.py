"""The folder of a run: settings, plan, metrics, a trace, checkpoints and the report.

Rank 0 writes; `shardwise.report.run_report` describes the files.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as, write_whole
from shardwise.launch.launchers import num_restarts
from shardwise.plans.trace import Trace
from shardwise.report.run_report import CONFIG, METRICS, PLAN, TRACE

from .settings import Settings

HOME = "runs"
CHECKPOINTS, CURVES = "checkpoints", "tensorboard"


def choose_folder(settings: Settings, comm: Communicator) -> Path:
    """The folder of the run, as rank 0 sees it; raises where another run would be damaged."""
    return Path(comm.gather_objects(str(_choose(settings)) if comm.rank == 0 else None)[0])


def resumes(settings: Settings) -> bool:
    """Whether a run goes on: because it was asked for, or an elastic launcher restarts it."""
    return settings.resume or num_restarts() > 0


def _choose(settings: Settings) -> Path:
    if settings.out is not None:
        folder = Path(settings.out)
        if folder.exists() and not folder.is_dir():
            raise ShardwiseError(f"out={settings.out!r} is not a folder")
        if (folder / METRICS).exists() and not resumes(settings):
            raise ShardwiseError(
                f"out={settings.out!r} already holds a run; go on with --resume, or choose another"
            )
        return folder
    name = "-".join(re.findall(r"\w+", settings.model.removesuffix(".py"))) or "run"
    taken = [
        int(match[1])
        for path in Path(HOME).glob(f"{name}-*")
        if (match := re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name))
    ]
    number = max(taken, default=0) + (0 if resumes(settings) and taken else 1)
    return Path(HOME) / f"{name}-{number}"


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


class RunFolder:
    """What rank 0 writes while a run goes on; on other ranks nothing happens."""

    def __init__(self, path: Path, first: bool) -> None:
        self.path, self._first = path, first
        self._metrics: Any = None
        self._curves: Any = None

    def begin(
        self, settings: dict[str, Any], plan_json: str, step: int, resumed_bytes: int | None
    ) -> None:
        """Writes what is known at the start; metrics go on from where a checkpoint had them."""
        if not self._first:
            return
        with system_errors_as(f"the run {str(self.path)!r} cannot be written"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / CONFIG, json.dumps(settings, indent=1) + "\n")
            write_whole(self.path / PLAN, plan_json)
            self._metrics = (self.path / METRICS).open("ab")
            if self._metrics.tell() > (resumed_bytes or 0):
                self._metrics.truncate(resumed_bytes or 0)
                self._metrics.seek(resumed_bytes or 0)
            self._curves = _event_writer(self.path / CURVES, step)

    @property
    def num_bytes(self) -> int:
        """Of the metrics so far."""
        return self._metrics.tell() if self._metrics is not None else 0

    def add(self, **values: Any) -> None:
        """One line of metrics."""
        if self._metrics is None:
            return
        line = json.dumps(values, allow_nan=False) + "\n"
        with system_errors_as(f"{str(self.path / METRICS)!r} cannot be written"):
            self._metrics.write(line.encode())
            self._metrics.flush()
            if self._curves is not None:
                for name, value in values.items():
                    if isinstance(value, float):
                        self._curves.add_scalar(name, value, values["step"])
                self._curves.flush()

    def add_step(self, step: int, loss: float, lr: float, rate: float) -> None:
        finite = loss if isfinite(loss) else None
        self.add(step=step, loss=finite, lr=lr, samples_per_second=rate)

    def add_trace(self, step: int, trace: Trace) -> None:
        """A step was written down: its trace is for the report, its waits are for everybody."""
        if self._first:
            trace.save(self.path / TRACE)
        exposed, overlap = float(trace.exposed.mean()), float(trace.overlap)
        seconds = float(trace.seconds)
        self.add(step=step, exposed_seconds=exposed, overlap=overlap, step_seconds=seconds)

    def add_epoch(self, step: int, epoch: Epoch, memory: list[int]) -> None:
        tested = {"test_loss": epoch.test_loss, "accuracy": epoch.accuracy}
        self.add(
            step=step,
            epoch=epoch.number,
            epoch_loss=epoch.loss,
            memory_bytes=memory,
            **{name: value for name, value in tested.items() if value is not None},
        )

    def close(self) -> None:
        for file in (self._metrics, self._curves):
            if file is not None:
                file.close()


def _event_writer(folder: Path, step: int) -> Any:
    """Curves for TensorBoard, where it is installed; what was said of later steps is void."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def memory_held(device: torch.device) -> int:
    """Bytes this rank has held at most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
