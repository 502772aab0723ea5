"""Restoring: everything is read and checked first, and then put in place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from shardwise.checkpoint.held_tensors import Held, check_model, held_tensors
from shardwise.checkpoint.manifest import NAME, Document
from shardwise.checkpoint.optimizer_state import Optimizing
from shardwise.checkpoint.pieces import BoxOfTensor, Pieces
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.snapshot import RANDOM, random_states
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.runtime.parallel import ParallelModel


@dataclass(frozen=True)
class Restoring:
    """A checkpoint that fits a model and its optimizer, and room for what is read of it."""

    path: Path
    document: Document
    model: ParallelModel
    held: list[Held]
    optimizing: Optimizing | None
    pieces: Pieces
    reader: Reader

    @classmethod
    def begin(cls, folder: Path, model: ParallelModel, optimizer: Optimizer | None) -> Restoring:
        """Reads the document, and raises where it is damaged or of something else."""
        path = folder / NAME
        document, held = Document.load(path), held_tensors(model)
        check_model(document, path, held)
        pieces = {
            document.names[tensor.names[0]]: tensor.awaited(tensor.tensor.dtype)
            for tensor in held
            if tensor.here
        }
        optimizing = None if optimizer is None else Optimizing(optimizer, held)
        if optimizing is not None:
            optimizing.check(document, path)
            pieces |= optimizing.awaited(document)
        for device, state in random_states(model).items():
            stored = document.tensors.get(RANDOM + device)
            if stored is not None:
                if stored.dtype != "uint8" or tuple(stored.shape) != tuple(state.shape):
                    raise ShardwiseError(f"{path}: tensors.{RANDOM}{device} is no random state")
                box = Box.whole(tuple(state.shape))
                pieces[RANDOM + device] = BoxOfTensor(box.shape, box, torch.empty_like(state))
        return cls(path, document, model, held, optimizing, pieces, Reader(folder, document))

    def finish(self) -> None:
        """Puts what was read in place."""
        self._restore_random()
        with torch.no_grad():
            for tensor in self.held:
                if tensor.here:
                    key = self.document.names[tensor.names[0]]
                    tensor.tensor.copy_(self.pieces[key].block)
        if self.optimizing is not None:
            self.optimizing.restore(self.document, self.pieces)

    def _restore_random(self) -> None:
        for device, state in random_states(self.model).items():
            if RANDOM + device in self.pieces:
                try:
                    _set_random(self.model, device, self.pieces[RANDOM + device].block)
                except RuntimeError as error:
                    _set_random(self.model, device, state)
                    raise ShardwiseError(
                        f"{self.path}: tensors.{RANDOM}{device}: {str(error).splitlines()[0]}"
                    ) from None


def _set_random(model: ParallelModel, device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, next(p.device for p in model.parameters() if p.is_cuda))
