"""`checkpoint.json`: what a checkpoint holds, where in its files it lies, and how it is read."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

import torch
from pydantic import Field, JsonValue, model_validator

from shardwise.checkpoint.pieces import as_bytes
from shardwise.errors import ShardwiseError
from shardwise.files import Checked, Strict, system_errors_as
from shardwise.geometry.box import Box
from shardwise.tensors import dtype_name

NAME = "checkpoint.json"
SAFETENSORS = {  # what that format calls its types; checkpoints have one more
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPES = {dtype_name(dtype): dtype for dtype in (*SAFETENSORS.values(), torch.complex128)}

Values = dict[str, dict[str, Any]]  # an optimizer's plain numbers, by parameter and key
Size = Annotated[int, Field(ge=0, lt=2**60)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class StoredChunk(Strict):
    """A box of a tensor, and its bytes in one of the files."""

    start: list[Size]
    shape: list[Size]
    file: Annotated[str, Field(pattern=r"^rank-[0-9]+\.bin$")]
    offset: Size
    bytes: Size
    crc32: Checksum

    @property
    def box(self) -> Box:
        stops = tuple(a + b for a, b in zip(self.start, self.shape, strict=True))
        return Box(tuple(self.start), stops)


class Stored(Strict):
    """A whole tensor, in chunks that hold each of its elements once."""

    shape: list[Size]
    dtype: str
    chunks: list[StoredChunk]

    @model_validator(mode="after")
    def _whole(self) -> Stored:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} must be one of {', '.join(DTYPES)}")
        itemsize = DTYPES[self.dtype].itemsize
        for chunk in self.chunks:
            if not len(chunk.start) == len(chunk.shape) == len(self.shape):
                raise ValueError("a chunk has another number of dimensions than its tensor")
            if not Box.whole(tuple(self.shape)).contains(chunk.box):
                raise ValueError(f"chunk {chunk.box} reaches beyond its tensor")
            if chunk.bytes != prod(chunk.shape) * itemsize:
                raise ValueError(f"chunk {chunk.box} cannot have {chunk.bytes} bytes")
        if sum(prod(chunk.shape) for chunk in self.chunks) != prod(self.shape):
            raise ValueError("the chunks do not hold the whole tensor")
        if _overlap([chunk.box for chunk in self.chunks]):
            raise ValueError("two chunks hold the same element")
        return self


class Group(Strict):
    """A group of parameters, and an optimizer's settings for it."""

    params: list[str]
    settings: dict[str, JsonValue]


class OptimizerState(Strict):
    """What an optimizer keeps beside tensors; `values` are plain numbers by parameter and key."""

    kind: str
    groups: list[Group]
    values: dict[str, dict[str, JsonValue]]


class Document(Checked):
    """What `checkpoint.json` says."""

    what = "the description of a checkpoint"

    format: Literal["shardwise checkpoint"] = "shardwise checkpoint"
    version: Literal[1] = 1
    step: Size
    progress: dict[str, JsonValue]
    names: dict[str, str]  # from the names of a state_dict to tensors; tied names share one
    optimizer: OptimizerState
    tensors: dict[str, Stored]

    @model_validator(mode="after")
    def _complete(self) -> Document:
        for name, key in self.names.items():
            if key not in self.tensors:
                raise ValueError(f"names.{name}: there is no tensor {key!r}")
        return self

    def file_sizes(self) -> dict[str, int]:
        """How many bytes each file must have at least."""
        sizes: dict[str, int] = {}
        for stored in self.tensors.values():
            for chunk in stored.chunks:
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.bytes)
        return sizes


def _overlap(boxes: list[Box]) -> bool:
    """Whether any two boxes share an element; only neighbours in the first dimension are tried."""
    boxes = sorted((box for box in boxes if not box.empty), key=lambda box: box.starts)
    for place, box in enumerate(boxes):
        for other in boxes[place + 1 :]:
            if other.starts[:1] and other.starts[0] >= box.stops[0]:
                break
            if not box.intersect(other).empty:
                return True
    return False


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
