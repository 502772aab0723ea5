"""What one rank writes into a checkpoint, copied between two steps; and how it is put back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.held_tensors import check_model, held_tensors, host_copy
from shardwise.checkpoint.manifest import Document, OptimizerState, Reader, Stored, Values
from shardwise.checkpoint.optimizer_state import Optimizing
from shardwise.checkpoint.pieces import BoxOfTensor
from shardwise.errors import ShardwiseError
from shardwise.runtime.parallel import ParallelModel, of

RANDOM = "random/"  # and a device: the state of its random generator, the same on all ranks


class Snapshot:
    """Copies of this rank's pieces, and what else there is to say about the model."""

    def __init__(
        self, step: int, model: ParallelModel, optimizer: Optimizer, progress: Mapping[str, Any]
    ) -> None:
        if step < 0:
            raise ShardwiseError(f"step={step} of a checkpoint must not be negative")
        self.step, held = step, held_tensors(model)
        copies = {tensor.key: tensor.copied(tensor.tensor, n) for n, tensor in enumerate(held)}
        optimizing = Optimizing(optimizer, held)
        self.kind, (self.groups, own, self.values) = optimizing.kind, optimizing.snapshot()
        self.pieces = {key: piece for key, piece in copies.items() if piece is not None} | own
        if of(model).comm.rank == 0:
            for device, state in random_states(model).items():
                self.pieces[RANDOM + device] = BoxOfTensor.whole(host_copy(state))
        keys = {name: tensor.key for tensor in held for name in tensor.names}
        self.names = {name: keys[name] for name in nn.Module.state_dict(model, keep_vars=True)}
        self.progress = _plain(progress)

    def document(self, values: Values, tensors: dict[str, Stored]) -> Document:
        """Describes the whole checkpoint: the numbers of all ranks, and where tensors lie."""
        optimizer = OptimizerState(kind=self.kind, groups=self.groups, values=values)
        return Document(
            step=self.step,
            progress=self.progress,
            names=self.names,
            optimizer=optimizer,
            tensors=tensors,
        )


def random_states(model: ParallelModel) -> dict[str, torch.Tensor]:
    """The states of the default random generators that the model uses."""
    states = {"cpu": torch.get_rng_state()}
    device = next((p.device for p in model.parameters() if p.is_cuda), None)
    return states if device is None else states | {"cuda": torch.cuda.get_rng_state(device)}


def _plain(progress: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the progress, which must be JSON data."""
    try:
        return json.loads(json.dumps(dict(progress)))
    except (TypeError, ValueError) as error:
        raise ShardwiseError(f"the progress of a checkpoint must be JSON data: {error}") from None


class Restoring:
    """What is read of a checkpoint that fits a model and its optimizer, before anything changes."""

    def __init__(self, folder: Path, model: ParallelModel, optimizer: Optimizer | None) -> None:
        """Reads what this rank needs; raises where it is damaged or of something else."""
        reader, held = Reader(folder), held_tensors(model)
        self.model, self.document, self.path = model, reader.document, reader.path
        check_model(self.document, self.path, held)
        self.optimizing = None if optimizer is None else Optimizing(optimizer, held)
        if self.optimizing is not None:
            self.optimizing.check(self.document, self.path)
        self.random: dict[str, torch.Tensor] = {}  # states by device
        for device, state in random_states(model).items():
            stored = self.document.tensors.get(RANDOM + device)
            if stored is not None:
                if stored.dtype != "uint8" or tuple(stored.shape) != tuple(state.shape):
                    raise ShardwiseError(
                        f"{self.path}: tensors.{RANDOM}{device} is no random state"
                    )
                self.random[device] = reader.read(RANDOM + device)
        self.blocks = [  # tensors of the model, and what is to be put there
            (tensor.tensor, reader.read(self.document.names[tensor.names[0]], tensor.box))
            for tensor in held
            if tensor.here
        ]
        self.state = {} if self.optimizing is None else self.optimizing.read(reader)

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
