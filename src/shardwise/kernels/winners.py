"""Measured times of kernels, by shape and direction, in one file per CPU and number of threads."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from shardwise.kernels.native import library
from shardwise.kernels.run import INEXACT, STOCK, workspace_bytes
from shardwise.kernels.shape import ConvShape

FORMAT = "shardwise-kernels-1"
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
            data = json.loads(path.read_text())
            return cls(path, threads, data["seconds"] if data["format"] == FORMAT else {})
        except FileNotFoundError:
            return cls(path, threads)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{path} cannot be read ({error}): kernels are timed anew", stacklevel=2)
            return cls(path, threads)

    def save(self) -> None:
        """Adds to the file what it does not have, and replaces it in one go."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        merged = {**Winners.load(self.threads).seconds, **self.seconds}
        data = {"format": FORMAT, "cpu": cpu_name(), "threads": self.threads, "seconds": merged}
        folder = self.path.parent
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump(data, file, indent=1)
        os.replace(file.name, self.path)

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
    home = os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise"
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
