"""Reading the files of a checkpoint, for torch.distributed.checkpoint; nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint import LoadPlan, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.futures import Future

from shardwise.checkpoint.manifest import DTYPES, Document, StoredChunk
from shardwise.checkpoint.pieces import as_bytes, done
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box


def _check_files(folder: Path, document: Document) -> None:
    """Raises where a file is shorter than it must be."""
    for name, size in document.file_sizes().items():
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ShardwiseError(f"{path} cannot be read: {error.strerror}") from None
        if found < size:
            raise ShardwiseError(f"{path} is {found} bytes and was {size}: it is damaged")


class Reader(StorageReader):
    """Reads chunks, each of which must have its checksum."""

    def __init__(self, folder: Path, document: Document) -> None:
        self.folder = folder
        _check_files(folder, document)
        self._chunks: dict[MetadataIndex, tuple[StoredChunk, torch.dtype]] = {}
        self._about: dict[str, TensorStorageMetadata] = {}
        for key, stored in document.tensors.items():
            dtype, chunks = DTYPES[stored.dtype], []
            for chunk in stored.chunks:
                self._chunks[MetadataIndex(key, chunk.start)] = chunk, dtype
                sizes = torch.Size(chunk.start), torch.Size(chunk.shape)
                chunks.append(ChunkStorageMetadata(*sizes))
            self._about[key] = TensorStorageMetadata(
                TensorProperties(dtype), torch.Size(stored.shape), chunks
            )

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self._about))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index, items in wanted.items():
            chunk = self._read(index)
            for item in items:
                part = chunk
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(part)
        return done(None)

    def read(self, key: str, box: Box) -> torch.Tensor:
        """The part of a tensor in a box, from the chunks that hold any of it."""
        about = self._about[key]
        block = torch.empty(box.shape, dtype=about.properties.dtype)
        for part in about.chunks:
            index = MetadataIndex(key, part.offsets)
            there = self._chunks[index][0].box
            common = there.intersect(box)
            if not common.empty:
                block[common.slices_in(box)] = self._read(index)[common.slices_in(there)]
        return block

    def _read(self, index: MetadataIndex) -> torch.Tensor:
        """A whole chunk, once it has proved to be what was written."""
        chunk, dtype = self._chunks[index]
        path, content = self.folder / chunk.file, torch.empty(chunk.bytes, dtype=torch.uint8)
        try:
            with path.open("rb") as file:
                file.seek(chunk.offset)
                num_bytes = file.readinto(as_bytes(content))
        except OSError as error:
            raise ShardwiseError(f"{path} cannot be read: {error.strerror}") from None
        if num_bytes != chunk.bytes or crc32(as_bytes(content)) != chunk.crc32:
            raise ShardwiseError(
                f"{path} is damaged: {index.fqn} {chunk.box} does not have its checksum"
            )
        return content.view(dtype).view(chunk.shape)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
