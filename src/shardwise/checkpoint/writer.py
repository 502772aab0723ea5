"""The files of a checkpoint, for torch.distributed.checkpoint: raw bytes, and JSON about them.

Torch's own storage describes a checkpoint in a pickle, which could run anything when it is read.
Here every rank writes one file of raw tensors, and rank 0 the document that says what lies where.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch
from pydantic import ValidationError
from torch.distributed.checkpoint import Metadata, SavePlan, StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.manifest import NAME, Document, Stored, StoredChunk, Values
from shardwise.checkpoint.pieces import as_bytes
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.errors import ShardwiseError
from shardwise.files import first_mistake, sync, write_whole
from shardwise.tensors import dtype_name


@dataclass(frozen=True)
class OwnWrites:
    """What a rank tells the first, and what it is told: where to write."""

    values: Values
    rank: int = 0
    folder: str = ""


class Writer(StorageWriter):
    """Writes a checkpoint into a hidden folder and publishes it when all ranks are done."""

    def __init__(self, folders: StepFolders, keep: int, taken: Snapshot | ShardwiseError) -> None:
        self.folders, self.keep, self.taken = folders, keep, taken
        self.temporary: Path | None = None
        self.values: Values = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.taken, ShardwiseError):
            raise self.taken
        if is_coordinator:
            self.temporary = self.folders.temporary(self.taken.step, uuid4().hex[:8])
            self.folders.tidy()
            with self.folders.writing():
                self.temporary.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=OwnWrites(self._snapshot.values))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Collects the numbers of all ranks, and tells each where to write."""
        for plan in plans:
            for name, values in plan.storage_data.values.items():
                self.values.setdefault(name, {}).update(values)
        return [
            replace(plan, storage_data=OwnWrites({}, rank, str(self.temporary)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, folder = f"rank-{plan.storage_data.rank}.bin", Path(plan.storage_data.folder)
        results, offset = [], 0
        with self.folders.writing():
            folder.mkdir(parents=True, exist_ok=True)  # seen late, perhaps, on another host
            with (folder / name).open("xb", buffering=0) as file:
                for item in plan.items:
                    block = planner.resolve_data(item)
                    assert isinstance(block, torch.Tensor)
                    content = as_bytes(block)
                    _write(file, content)
                    about = {"file": name, "offset": offset, "crc32": crc32(content)}
                    results.append(WriteResult(item.index, len(content), about))
                    offset += len(content)
            sync(folder / name)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)  # written already
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 writes the document; `publish` renames the folder, and others can load it."""
        document = self._document(metadata, results)
        assert self.temporary is not None
        for name in document.file_sizes():
            if not (self.temporary / name).exists():
                raise ShardwiseError(
                    f"{self.folders} must be one folder for all hosts, and {name} has been written "
                    "to another"
                )
        with self.folders.writing():
            write_whole(self.temporary / NAME, document.to_json())
            sync(self.folders.folder.parent)
            published = self.folders.publish(self.temporary, document.step)
        self.folders.prune(self.keep, published)

    def _document(self, metadata: Metadata, results: list[list[WriteResult]]) -> Document:
        written = {result.index: result for own in results for result in own}
        try:
            tensors = {
                key: _stored(key, about, written)
                for key, about in metadata.state_dict_metadata.items()
                if isinstance(about, TensorStorageMetadata)
            }
            return self._snapshot.document(self.values, tensors)
        except ValidationError as error:  # which could not be sent to the other ranks
            raise ShardwiseError(
                f"a checkpoint cannot be written to {self.folders}: {first_mistake(error)}"
            ) from None

    def give_up(self) -> None:
        """Gives back the space of a checkpoint that will not be complete."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def _snapshot(self) -> Snapshot:
        assert isinstance(self.taken, Snapshot)
        return self.taken

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _write(file: Any, content: memoryview) -> None:
    """All of it: one call of an unbuffered file may write a part only."""
    while content:
        content = content[file.write(content) :]


def _stored(
    key: str, about: TensorStorageMetadata, written: dict[MetadataIndex, WriteResult]
) -> Stored:
    chunks = []
    for chunk in about.chunks:
        result = written[MetadataIndex(key, chunk.offsets)]
        chunks.append(
            StoredChunk(
                start=list(chunk.offsets),
                shape=list(chunk.sizes),
                bytes=result.size_in_bytes,
                **result.storage_data,
            )
        )
    dtype = dtype_name(about.properties.dtype)
    return Stored(shape=list(about.size), dtype=dtype, chunks=chunks)
