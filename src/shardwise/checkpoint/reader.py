"""Reading the files of a checkpoint: any box of its tensors; nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import torch

from shardwise.checkpoint.manifest import DTYPES, NAME, Document, StoredChunk
from shardwise.checkpoint.pieces import as_bytes
from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as
from shardwise.geometry.box import Box


class Reader:
    """Reads chunks, each of which must have its checksum."""

    def __init__(self, folder: Path) -> None:
        """Raises where the document is damaged, or a file is shorter than it must be."""
        self.folder, self.path = folder, folder / NAME
        self.document = Document.load(self.path)
        for name, size in self.document.file_sizes().items():
            path = folder / name
            with system_errors_as(f"{path} cannot be read"):
                found = path.stat().st_size
            if found < size:
                raise ShardwiseError(f"{path} is {found} bytes and was {size}: it is damaged")

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        """The part of a tensor in a box, or all of it, from the chunks that hold any of it."""
        stored = self.document.tensors[key]
        box = Box.whole(tuple(stored.shape)) if box is None else box
        block = torch.empty(box.shape, dtype=DTYPES[stored.dtype])
        for chunk in stored.chunks:
            common = chunk.box.intersect(box)
            if not common.empty:
                content = self._read(key, chunk).view(block.dtype).view(chunk.shape)
                block[common.slices_in(box)] = content[common.slices_in(chunk.box)]
        return block

    def _read(self, key: str, chunk: StoredChunk) -> torch.Tensor:
        """The bytes of a chunk, once they have proved to be what was written."""
        path, content = self.folder / chunk.file, torch.empty(chunk.bytes, dtype=torch.uint8)
        with system_errors_as(f"{path} cannot be read"), path.open("rb") as file:
            file.seek(chunk.offset)
            num_bytes = file.readinto(as_bytes(content))
        if num_bytes != chunk.bytes or crc32(as_bytes(content)) != chunk.crc32:
            raise ShardwiseError(f"{path} is damaged: {key} {chunk.box} does not have its checksum")
        return content
