"""What to say when memory runs out: in which layer, and which plan would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardwise.errors import PlanError, ShardwiseError
from shardwise.planner.best_plan import Planner, predict

from .setting_up import make_costs

if TYPE_CHECKING:
    from .trainer import Trainer

SIGNS = (
    "can't allocate memory",
    "out of memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
)
LESS = (0.75, 0.5)  # of what this plan needs, that another may


@contextmanager
def explained(trainer: Trainer) -> Iterator[None]:
    """Within, memory that runs out is one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        if not hasattr(trainer, "checkpoints"):
            raise ShardwiseError(
                f"out of memory on rank {trainer.comm.rank} before the first step; use more "
                "workers, or a smaller batch"
            ) from None
        place = trainer.comm.timeline.place or "the model"
        raise ShardwiseError(
            f"out of memory in layer {place!r} on rank {trainer.comm.rank}; {_advice(trainer)}"
        ) from None


def _is_memory(error: Exception) -> bool:
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or any(sign in str(error) for sign in SIGNS)


def _advice(trainer: Trainer) -> str:
    """What this plan needs, and a plan that needs less."""
    costs = make_costs(trainer.settings, trainer.graph, trainer.comm.size)
    needed, planner = predict(trainer.plan, costs).memory, Planner(costs)
    text = f"the plan needs about {_mib(needed)} per worker"
    for part in LESS:
        try:
            prediction = planner.under(int(part * needed))[1]
        except PlanError:
            continue
        wish = _mib(int(part * needed))
        return f"{text}; --memory {wish} finds one that needs {_mib(prediction.memory)}"
    return f"{text}, and no other needs much less: use more workers, or a smaller batch"


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}MiB"
