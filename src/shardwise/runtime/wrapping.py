"""What is done around every layer of a block, only while somebody wants it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from shardwise.comm.timeline import Timeline
from shardwise.runtime.lowering import Function, Stage

Watch = Callable[[str, torch.Tensor], None]  # is shown a layer's name and its output
Wrap = Callable[[Stage], Function]


def recorded(timeline: Timeline, stage: Stage, kind: str = "forward") -> Function:
    """Notes when a layer begins, forward and backward."""

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        timeline.switch(stage.name, kind)
        y = stage.run(tensors)
        if y.grad_fn is not None:  # not on a parameter itself, where the hook would stay
            y.register_hook(partial(_turn, timeline, stage.name))
        return y

    return run


def _turn(timeline: Timeline, name: str, _: torch.Tensor) -> None:
    """The gradient of a layer's output is there: the next thing is its backward pass."""
    timeline.switch(name, "backward")


def watched(watch: Watch, stage: Stage) -> Function:
    """Shows what every layer makes."""

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        y = stage.run(tensors)
        watch(stage.name, y)
        return y

    return run


def updated_before_use(update_delayed: Callable[[tuple[str, ...]], None], stage: Stage) -> Function:
    """Updates weights whose last update was put off until they are used."""

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        update_delayed(stage.stored)
        return stage.run(tensors)

    return run if stage.stored else stage.run
