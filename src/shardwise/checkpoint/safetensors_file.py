"""Safetensors files, of which any box of a tensor can be read without the rest.

The library's own `safe_open` maps the whole file into memory. That counts against limits on the
address space (`ulimit -v`, batch systems): 200 MB for a file of 200 MB, whatever is read of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError

from shardwise.checkpoint.manifest import SAFETENSORS, Size
from shardwise.checkpoint.pieces import as_bytes
from shardwise.errors import ShardwiseError
from shardwise.files import Strict, first_mistake, system_errors_as
from shardwise.geometry.box import Box

LONGEST = 100_000_000  # bytes of a header, as in the library itself


class TensorPlace(Strict):
    """What the header of a file says of a tensor: its bytes lie there in the rest of the file."""

    dtype: str
    shape: list[Size]
    data_offsets: Annotated[list[Size], Field(min_length=2, max_length=2)]


HEADER = TypeAdapter(dict[str, TensorPlace])


def read_header(path: Path) -> tuple[dict[str, TensorPlace], int]:
    """What the file holds, and where its data begins; every mistake is one sentence."""
    with system_errors_as(f"{path} cannot be read"), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if size < 8 or length > min(size - 8, LONGEST):
            raise ShardwiseError(f"{path} is no safetensors file, or it is cut off")
        header = file.read(length)
    try:
        content: Any = json.loads(header.decode())
    except (ValueError, RecursionError):
        raise ShardwiseError(f"{path} is no safetensors file: its header is no JSON") from None
    if isinstance(content, dict):
        content.pop("__metadata__", None)
    try:
        entries = HEADER.validate_python(content)
    except ValidationError as error:
        raise ShardwiseError(f"{path}: {first_mistake(error, 'its header')}") from None
    for name, entry in entries.items():
        _check(path, name, entry, size - 8 - length)
    return entries, 8 + length


def _check(path: Path, name: str, entry: TensorPlace, num_bytes: int) -> None:
    if entry.dtype not in SAFETENSORS:
        raise ShardwiseError(
            f"{path}: {name!r} is of type {entry.dtype!r}, and must be of {', '.join(SAFETENSORS)}"
        )
    begin, end = entry.data_offsets
    if end - begin != prod(entry.shape) * SAFETENSORS[entry.dtype].itemsize:
        raise ShardwiseError(f"{path} is damaged: {name!r} cannot have {end - begin} bytes")
    if end > num_bytes:
        raise ShardwiseError(f"{path} is cut off: {name!r} ends beyond it")


def read_box(path: Path, entry: TensorPlace, begin: int, box: Box) -> torch.Tensor:
    """The part of a tensor in a box; nothing else is read."""
    dtype = SAFETENSORS[entry.dtype]
    block = torch.empty(box.shape, dtype=dtype)
    if box.empty:
        return block
    content, done = as_bytes(block), 0
    with system_errors_as(f"{path} cannot be read"), path.open("rb", buffering=0) as file:
        for place, numel in runs(tuple(entry.shape), box):
            file.seek(begin + entry.data_offsets[0] + place * dtype.itemsize)
            end = done + numel * dtype.itemsize
            while done < end:
                count = file.readinto(content[done:end])
                if not count:
                    raise ShardwiseError(f"{path} is cut off")
                done += count
    return block


def runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Where elements of a box follow each other in memory: the first of them, and how many.

    >>> list(runs((4, 6), Box((1, 2), (3, 5))))
    [(8, 3), (14, 3)]
    """
    whole = [size == full for size, full in zip(box.shape, shape, strict=True)]
    last = max((dim for dim, is_whole in enumerate(whole) if not is_whole), default=0)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    numel = prod(box.shape[last:])
    outer = [range(a, b) for a, b in zip(box.starts[:last], box.stops[:last], strict=True)]
    for index in product(*outer):
        first = (*index, *box.starts[last:])
        yield sum(i * stride for i, stride in zip(first, strides, strict=True)), numel
