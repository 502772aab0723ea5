"""Starting a run: on local workers, or on those of a launcher."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.launch.launchers import choose_world, init_from_environment, under_launcher
from shardwise.launch.workers import run_local
from shardwise.specs.plan_spec import PlanSpec

from .journal import Epoch
from .settings import Settings
from .trainer import Trainer


def train(settings: Settings) -> list[Epoch]:
    """Trains and returns what each epoch came to; under a launcher, on rank 0 only.

    >>> history = train(Settings(workers=2, epochs=3))
    """
    meant = PlanSpec.parse(settings.plan, settings.split)
    world = choose_world(settings.workers, meant.num_workers)
    meant.check_workers(world)
    if not under_launcher():
        return run_local(_fit, world, settings, timeout=settings.timeout)[0]
    device = init_from_environment(settings.timeout)
    history = _fit(settings, device)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return history if first else []


def _fit(settings: Settings, device: torch.device | None = None) -> list[Epoch]:
    return Trainer(settings, device=device or _local_device()).fit()


def _local_device() -> torch.device:
    """Local workers share the GPUs of this machine, if it has any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.device("cuda", rank % torch.cuda.device_count())
