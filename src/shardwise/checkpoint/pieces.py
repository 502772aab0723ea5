"""A piece: what one rank writes of a tensor, as torch.distributed.checkpoint asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.geometry.box import Box
from shardwise.geometry.layout import blocks

SMALL = 1 << 20  # bytes of a block that one rank writes alone, whoever else holds it


@dataclass(frozen=True)
class BoxOfTensor:
    """A box of a tensor of this shape and what lies in it; torch's `_Checkpointable`."""

    shape: tuple[int, ...]
    box: Box
    block: torch.Tensor

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> BoxOfTensor:
        box = Box.whole(tuple(tensor.shape))
        return cls(box.shape, box, tensor)

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.box.starts), torch.Size(self.box.shape))

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        data = TensorWriteData(
            self._chunk, TensorProperties(self.block.dtype), torch.Size(self.shape)
        )
        index = MetadataIndex(fqn, self.box.starts)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.block


Pieces = dict[str, BoxOfTensor]


def written_box(box: Box, ranks: Sequence[int], rank: int, itemsize: int, turn: int) -> Box | None:
    """The part of a box that one of the ranks that hold it writes, if any.

    Each element has one writer: of a large block, every rank writes a part; small ones are dealt
    out in turn.
    """
    dim = next((d for d, size in enumerate(box.shape) if size >= len(ranks)), None)
    if dim is None or box.numel * itemsize < SMALL:
        return box if ranks[turn % len(ranks)] == rank else None
    start, stop = (blocks(box.shape[dim], len(ranks))[ranks.index(rank)] + box.starts[dim]).tolist()
    starts = (*box.starts[:dim], start, *box.starts[dim + 1 :])
    return Box(starts, (*box.stops[:dim], stop, *box.stops[dim + 1 :]))


class SavePlanner(DefaultSavePlanner):
    """Saves pieces as they are."""

    def set_up_planner(
        self,
        state_dict: Pieces,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self.flatten_state_dict = False

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].block


def as_bytes(block: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the host's memory."""
    return block.reshape(-1).view(torch.uint8).numpy().data.cast("B")
