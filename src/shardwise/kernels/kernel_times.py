"""Measured times of kernels, by shape and direction, in one file per CPU and number of threads."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter

from shardwise.files import TimesFile
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.native import library

Times = dict[str, float]  # seconds by kernel
CPU = ("cpu family", "model\t", "model name", "stepping")  # what tells CPUs apart


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
