"""How far a reader of one call must go: files visited, and hops from one file to another.

    PYTHONPATH=src python tests/hops.py

Counted with a profiler for a net of seven layers on two ranks, of which the first is looked at. A
hop is a call of a function that lies in another file than the function of ours that called it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise.comm.in_process import World

SOURCE = str(Path(shardwise.__file__).parent)
ONCE = ("<module>", "__getattr__")  # imports


@dataclass
class Hops:
    """What was called while this was on."""

    files: Counter[str] = field(default_factory=Counter)
    hops: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: int = 0

    def count(self, call: Callable[[], Any]) -> Any:
        sys.setprofile(self._note)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(SOURCE) or frame.f_code.co_name in ONCE:
            return
        self.calls += 1
        self.files[name] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(SOURCE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != name:
            self.hops[caller.f_code.co_filename, name] += 1

    def __str__(self) -> str:
        total = sum(self.hops.values())
        return f"{len(self.files):4} files {total:7,} hops {self.calls:8,} calls"


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 4))


def counted() -> dict[str, Hops]:
    """What `plan` visits, and a later forward and backward pass of its model."""
    found = {name: Hops() for name in ("plan", "forward", "backward")}
    model, x = net(), torch.randn(4, 3, 16, 16)
    shardwise.plan(net(), x, cluster="2x1Gb")  # imports everything
    found["plan"].count(lambda: shardwise.plan(model, x, cluster="2x1Gb"))
    plan = shardwise.Plan.uniform(shardwise.capture(model, x), h=2)

    def work(comm: Any) -> None:
        parallel = shardwise.parallelize(model, plan, comm=comm)
        parallel(x).sum().backward()
        if comm.rank:
            parallel(x).sum().backward()
        else:
            loss = found["forward"].count(lambda: parallel(x)).sum()
            found["backward"].count(loss.backward)

    World(2).run(work)
    return found


def main() -> None:
    for name, hops in counted().items():
        print(f"{name:<10}{hops}")
        for (source, target), number in hops.hops.most_common(45 if "-v" in sys.argv else 0):
            short = (file.removeprefix(SOURCE).lstrip("/") for file in (source, target))
            print(f"{number:>18,}  {' -> '.join(short)}")


if __name__ == "__main__":
    main()
