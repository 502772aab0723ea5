"""Measured times of kernels, by shape and direction, in one file per CPU and number of threads."""

from __future__ import annotations

import json
import os
import platform
import warnings
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch

from shardwise.files import alone_with, write_whole
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import INEXACT, STOCK, workspace_bytes
from shardwise.kernels.native import library

FORMAT = "shardwise-kernels-1"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
Times = dict[str, float]  # seconds by kernel


@dataclass
class Winners:
    """What was timed; the fastest kernel is looked up, not stored, since limits may change."""

    path: Path
    threads: int
    seconds: dict[str, dict[str, Times]] = field(default_factory=dict)  # shape, direction, kernel

    @classmethod
    def load(cls, threads: int) -> Winners:
        """The times of this CPU; a file that cannot be read is timed anew, said once."""
        path = _path(threads)
        try:
            return cls(path, threads, _seconds(json.loads(path.read_text())))
        except FileNotFoundError:
            return cls(path, threads)
        except UNREADABLE as error:
            warnings.warn(f"{path} cannot be read ({error}): kernels are timed anew", stacklevel=2)
            return cls(path, threads)

    def save(self) -> None:
        """Adds to the file what others have put there since, and replaces it in one go.

        Where nothing can be written, which is said, the times are those of this process alone.
        """
        try:
            with alone_with(self.path):
                write_whole(self.path, json.dumps(self._merged(), indent=1))
        except OSError as error:
            warnings.warn(f"times of kernels cannot be kept in {self.path} ({error})", stacklevel=2)

    def _merged(self) -> dict[str, Any]:
        """What the file should say."""
        merged = Winners.load(self.threads).seconds
        for shape, directions in self.seconds.items():
            for direction, times in directions.items():
                merged.setdefault(shape, {}).setdefault(direction, {}).update(times)
        return {"format": FORMAT, "cpu": cpu_name(), "threads": self.threads, "seconds": merged}

    def times(self, shape: ConvShape, direction: str) -> Times:
        return self.seconds.get(shape.key, {}).get(direction, {})

    def best(
        self, shape: ConvShape, direction: str, memory_bytes: int | None, exact: bool
    ) -> str | None:
        """The fastest kernel inside the limits, or None if nothing was timed."""
        allowed = {
            name: seconds
            for name, seconds in self.times(shape, direction).items()
            if fits(name, direction, shape, self.threads, memory_bytes, exact)
        }
        return min(allowed, key=allowed.__getitem__) if allowed else None


def _seconds(data: dict[str, Any]) -> dict[str, dict[str, Times]]:
    """The times of a file, if it is one of ours."""
    if data["format"] != FORMAT:
        return {}
    found = {
        shape: {
            direction: {name: float(taken) for name, taken in times.items()}
            for direction, times in directions.items()
        }
        for shape, directions in data["seconds"].items()
    }
    if not all(0 < t < inf for d in found.values() for times in d.values() for t in times.values()):
        raise ValueError("a time is not a positive number of seconds")
    return found


def fits(
    kernel: str,
    direction: str,
    shape: ConvShape,
    threads: int,
    memory_bytes: int | None,
    exact: bool,
) -> bool:
    """Whether a kernel takes this shape inside the limits; the stock operator always does."""
    if kernel == STOCK:
        return True
    needed = workspace_bytes(kernel, direction, shape, threads)
    roomy = memory_bytes is None or needed <= memory_bytes
    return needed >= 0 and roomy and not (exact and kernel in INEXACT)


def _path(threads: int) -> Path:
    home = os.environ.get("SHARDWISE_CACHE") or os.path.expanduser("~/.cache/shardwise")
    lib = library()
    isa = lib.isa if lib is not None else "stock"
    name = f"{cpu_name()} {isa} {threads} threads torch {torch.__version__}"
    return Path(home) / f"kernels-{''.join(c if c.isalnum() else '-' for c in name)}.json"


@cache
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        keys = ("cpu family", "model\t", "model name", "stepping")
        found = [line.split(":")[1].strip() for line in lines if line.startswith(keys)]
        return " ".join(found[: len(keys)]) or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()
