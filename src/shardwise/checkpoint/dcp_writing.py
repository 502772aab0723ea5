"""What torch.distributed.checkpoint writes: a new folder, by the names that torch's own use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp

from shardwise.checkpoint.manifest import Group, OptimizerState
from shardwise.checkpoint.optimizer_state import PREFIX
from shardwise.errors import ShardwiseError

MODEL, OPTIMIZER = "model", "optim"  # as torch's own examples call them


def check_new(folder: Path) -> None:
    """Raises where a folder holds anything: a checkpoint is never mixed with another."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ShardwiseError(f"{folder} exists already: give the name of a new folder")


def as_torch(groups: list[Group]) -> list[dict[str, Any]]:
    """Groups as `get_optimizer_state_dict` writes them: parameters by name."""
    return [{**group.settings, "params": list(group.params)} for group in groups]


def write_dcp(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    optimizer: OptimizerState,
    kept: Mapping[str, Any],
) -> None:
    """Writes whole tensors as one process does: weights, and what an optimizer keeps by name."""
    check_new(folder)
    own: dict[str, dict[str, Any]] = {name: dict(v) for name, v in optimizer.values.items()}
    for key, tensor in kept.items():
        name, _, last = key.removeprefix(f"{PREFIX}/").rpartition("/")
        own.setdefault(name, {})[last] = tensor
    optim = {"state": own, "param_groups": as_torch(optimizer.groups)}
    torch_dcp.save({MODEL: dict(state), OPTIMIZER: optim}, checkpoint_id=folder, no_dist=True)
