"""What a model holds, as a checkpoint sees it: tensors by name, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from shardwise.checkpoint.manifest import Document
from shardwise.checkpoint.pieces import BoxOfTensor, written_box
from shardwise.errors import ShardwiseError, some
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.modules import named_tensors
from shardwise.runtime.block import plain
from shardwise.runtime.parallel import ParallelModel, of


@dataclass(frozen=True)
class Held:
    """A tensor of the model, its names, and where its blocks lie; without layout, all have it."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    layout: Layout | None
    rank: int
    world: int

    @property
    def key(self) -> str:
        return f"model/{self.names[0]}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.layout is None else self.layout.shape

    @cached_property
    def box(self) -> Box:
        return Box.whole(self.shape) if self.layout is None else self.layout[self.rank]

    @cached_property
    def here(self) -> bool:
        """Whether this rank holds any of it."""
        return self.layout is None or not self.box.empty

    @cached_property
    def first(self) -> int:
        """The lowest rank that holds any of it."""
        return 0 if self.layout is None else int(np.argmax(self.layout.numels > 0))

    @cached_property
    def sharers(self) -> Sequence[int]:
        """The ranks that hold the same block."""
        return range(self.world) if self.layout is None else self.layout.segment(self.rank)

    def copied(self, tensor: torch.Tensor, turn: int) -> BoxOfTensor | None:
        """What this rank writes of a tensor that lies as this one: the parameter, its momentum."""
        if not self.here:
            return None
        itemsize = tensor.element_size()
        box = written_box(self.box, self.sharers, self.rank, itemsize, turn)
        if box is None:
            return None
        part = plain(tensor)[box.slices_in(self.box)]
        return BoxOfTensor(self.shape, box, host_copy(part))


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in the host's memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def held_tensors(model: ParallelModel) -> list[Held]:
    """What `state_dict` would hold, each tensor once."""
    handle, tensors = of(model), dict(named_tensors(model))
    names: dict[int, list[str]] = {}
    for name in nn.Module.state_dict(model, keep_vars=True):
        if name not in tensors:
            raise ShardwiseError(
                f"{name!r} of the model's state is neither a parameter nor a buffer, and a "
                "checkpoint cannot hold it"
            )
        names.setdefault(id(tensors[name]), []).append(name)
    found = []
    for own in names.values():
        tensor = tensors[own[0]]
        layout = handle.layout(own[0]) if tensor.ndim else None
        if layout is not None and not layout.numels.any():
            layout = None
        found.append(Held(tuple(own), tensor, layout, handle.comm.rank, handle.comm.size))
    return found


def check_model(document: Document, place: object, held: Iterable[Held]) -> None:
    """Raises where a checkpoint is of another model: other names, shapes or kinds of numbers."""
    own = {name: tensor for tensor in held for name in tensor.names}
    missing = [name for name in own if name not in document.names]
    unknown = [name for name in document.names if name not in own]
    if missing:
        raise ShardwiseError(f"{place} is of another model: it lacks {some(missing)}")
    if unknown:
        raise ShardwiseError(f"{place} is of another model, which has {some(unknown)}")
    for name, tensor in own.items():
        stored = document.tensors[document.names[name]]
        saved = described(stored.shape, stored.dtype)
        here = described(tensor.shape, tensor.tensor.dtype)
        if saved != here:
            others = sum(
                tuple(document.tensors[document.names[n]].shape) != t.shape for n, t in own.items()
            )
            more = f" (and {others - 1} others differ in shape)" if others > 1 else ""
            raise ShardwiseError(
                f"{place} is of another model: {name!r} is {saved} there and {here} here{more}"
            )
        if document.names[name] != document.names[tensor.names[0]]:
            raise ShardwiseError(
                f"{place} is of another model: {name!r} and {tensor.names[0]!r} are one tensor "
                "here and two there"
            )
    if len({document.names[n] for n in own}) != len({id(t) for t in own.values()}):
        raise ShardwiseError(f"{place} is of another model: it ties parameters that are two here")


def described(shape: Sequence[int], dtype: object) -> str:
    """A tensor's shape and type in words.

    >>> described((3, 4), torch.float32)
    '3x4 float32'
    """
    return f"{'x'.join(map(str, shape)) or 'a number'} {str(dtype).removeprefix('torch.')}"
