"""Restoring: everything is read and checked first, and then put in place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from shardwise.checkpoint.held_tensors import check_model, held_tensors
from shardwise.checkpoint.manifest import Document
from shardwise.checkpoint.optimizer_state import Optimizing, State
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.snapshot import RANDOM, random_states
from shardwise.errors import ShardwiseError
from shardwise.runtime.parallel import ParallelModel


@dataclass(frozen=True)
class Restoring:
    """What was read of a checkpoint that fits a model and its optimizer."""

    path: Path
    document: Document
    model: ParallelModel
    blocks: list[tuple[torch.Tensor, torch.Tensor]]  # of the model, and what is to be put there
    random: dict[str, torch.Tensor]  # states by device
    optimizing: Optimizing | None
    state: State  # of the optimizer

    @classmethod
    def read(cls, folder: Path, model: ParallelModel, optimizer: Optimizer | None) -> Restoring:
        """Reads what this rank needs; raises where it is damaged or of something else."""
        reader, held = Reader(folder), held_tensors(model)
        document, path = reader.document, reader.path
        check_model(document, path, held)
        optimizing = None if optimizer is None else Optimizing(optimizer, held)
        if optimizing is not None:
            optimizing.check(document, path)
        random = {}
        for device, state in random_states(model).items():
            stored = document.tensors.get(RANDOM + device)
            if stored is not None:
                if stored.dtype != "uint8" or tuple(stored.shape) != tuple(state.shape):
                    raise ShardwiseError(f"{path}: tensors.{RANDOM}{device} is no random state")
                random[device] = reader.read(RANDOM + device)
        blocks = [
            (tensor.tensor, reader.read(document.names[tensor.names[0]], tensor.box))
            for tensor in held
            if tensor.here
        ]
        kept = {} if optimizing is None else optimizing.read(reader)
        return cls(path, document, model, blocks, random, optimizing, kept)

    def finish(self) -> None:
        """Puts what was read in place."""
        self._restore_random()
        with torch.no_grad():
            for tensor, block in self.blocks:
                tensor.copy_(block)
        if self.optimizing is not None:
            self.optimizing.restore(self.document, self.state)

    def _restore_random(self) -> None:
        present = random_states(self.model)
        for device, state in self.random.items():
            try:
                _set_random(self.model, device, state)
            except RuntimeError as error:
                _set_random(self.model, device, present[device])
                raise ShardwiseError(
                    f"{self.path}: tensors.{RANDOM}{device}: {str(error).splitlines()[0]}"
                ) from None


def _set_random(model: ParallelModel, device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, next(p.device for p in model.parameters() if p.is_cuda))
