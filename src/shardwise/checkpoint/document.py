"""`checkpoint.json`: what a checkpoint holds, and where in its files each part of it lies."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from shardwise.box import Box
from shardwise.errors import ShardwiseError

NAME = "checkpoint.json"
FORMAT, VERSION = "shardwise checkpoint", 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}

Values = dict[str, dict[str, Any]]  # an optimizer's plain numbers, by parameter and key
Size = Annotated[int, Field(ge=0, lt=2**60)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Chunk(_Strict):
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


class Stored(_Strict):
    """A whole tensor, in chunks that hold each of its elements once."""

    shape: list[Size]
    dtype: str
    chunks: list[Chunk]

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


class Group(_Strict):
    """A group of parameters, and an optimizer's settings for it."""

    params: list[str]
    settings: dict[str, JsonValue]


class OptimizerState(_Strict):
    """What an optimizer keeps beside tensors; `values` are plain numbers by parameter and key."""

    kind: str
    groups: list[Group]
    values: dict[str, dict[str, JsonValue]]


class Document(_Strict):
    """What `checkpoint.json` says."""

    format: Literal["shardwise checkpoint"] = FORMAT
    version: Literal[1] = VERSION
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

    def to_json(self) -> str:
        content = self.model_dump(mode="json")
        return json.dumps({**content, "crc32": _checksum(content)}) + "\n"

    @classmethod
    def load(cls, path: Path) -> Document:
        """Reads and checks it; every mistake is one sentence that names the file and the field."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            given = content.pop("crc32", None) if isinstance(content, dict) else None
            checksum = _checksum(content)
        except OSError as error:
            raise ShardwiseError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ShardwiseError(f"{path} is damaged: it is no JSON") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ShardwiseError(f"{path} does not describe a checkpoint")
        if given != checksum:
            raise ShardwiseError(f"{path} is damaged: it does not have its checksum")
        if content.get("version") != VERSION:
            raise ShardwiseError(
                f"{path} is of version {content.get('version')!r}, and this shardwise reads "
                f"version {VERSION}"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ShardwiseError(f"{path}: {first_mistake(error)}") from None


def first_mistake(error: ValidationError) -> str:
    """The field of a document that is wrong, and why."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"][:8])) or "the document"
    return f"{place}: {first['msg']}"


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


def _checksum(content: Any) -> int:
    """Of what a document says, however it is spaced and ordered."""
    return crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
