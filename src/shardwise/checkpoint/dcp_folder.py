"""A folder of torch.distributed.checkpoint, of which any box of a tensor can be read.

What lies where is in its `.metadata`, a pickle. Nothing in it is run: names of torch's own records
of data become plain records here, and any other name is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from shardwise.errors import ShardwiseError, one_line
from shardwise.files import system_errors_as
from shardwise.geometry.box import Box

METADATA = ".metadata"
HOMES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
RECORDS = {
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo"),
}
Path_ = tuple[Any, ...]  # the keys that lead to a value, from the outside


class _Record:
    """A record of torch's as data; what it was made from is not interpreted."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"given": state})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in HOMES and name in RECORDS:
            return type(name, (_Record,), {})  # a new one each time: a pickle cannot change others
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _Record
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return _Record
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise ShardwiseError(f"it names {module}.{name}, which is not loaded from files")


@dataclass(frozen=True)
class FolderChunk:
    """A box of a tensor, and the part of a file that torch.save wrote it to."""

    box: Box
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class FolderEntry:
    """What lies under one name: a tensor in chunks, or a value where there is no shape."""

    path: Path_
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[FolderChunk, ...]

    def read(self, box: Box) -> torch.Tensor:
        """The part of a tensor in a box; chunks that hold none of it are not read."""
        assert self.dtype is not None
        block = torch.empty(box.shape, dtype=self.dtype)
        for chunk in self.chunks:
            common = chunk.box.intersect(box)
            if not common.empty:
                whole = _loaded(chunk)
                if not isinstance(whole, torch.Tensor) or tuple(whole.shape) != chunk.box.shape:
                    raise ShardwiseError(f"{chunk.file} is damaged: {self.path[-1]!r} {chunk.box}")
                block[common.slices_in(box)] = whole[common.slices_in(chunk.box)]
        return block

    def value(self) -> Any:
        """What is no tensor, or the whole tensor."""
        if self.shape is not None:
            return self.read(Box.whole(self.shape))
        return _loaded(self.chunks[0])


@dataclass(frozen=True)
class DcpFolder:
    """Everything that a folder says it holds."""

    place: Path
    entries: Mapping[str, FolderEntry]
    checksum: int

    def below(self, *last: str) -> dict[Path_, FolderEntry]:
        """Entries by what follows the first of these keys in their paths."""
        found = {}
        for entry in self.entries.values():
            for place, key in enumerate(entry.path[:-1]):
                if key in last:
                    found[entry.path[place + 1 :]] = entry
                    break
        return found


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def open_dcp(folder: Path) -> DcpFolder:
    """Reads the description of a folder, and checks that it is one."""
    path = folder / METADATA
    with system_errors_as(f"{path} cannot be read"):
        written = path.read_bytes()
    try:
        described = _Unpickler(BytesIO(written)).load()
        entries = dict(_entries(folder, described))
    except ShardwiseError as error:
        raise ShardwiseError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # a damaged pickle may fail in any way
        raise ShardwiseError(
            f"{path} is no description of a checkpoint: {one_line(error)}"
        ) from None
    return DcpFolder(folder, entries, crc32(written))


def _entries(folder: Path, described: Any) -> Iterator[tuple[str, FolderEntry]]:
    stored: dict[tuple[str, tuple[int, ...] | None], _Record] = {}
    for index, info in described.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ShardwiseError(f"{index.fqn!r} is compressed or encrypted by an extension")
        stored[index.fqn, getattr(index, "offset", None)] = info
    paths = described.planner_data or {}
    for name, about in described.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if not hasattr(about, "chunks"):
            chunk = _chunk(folder, Box((), ()), stored[name, None])
            yield name, FolderEntry(path, None, None, (chunk,))
            continue
        shape, dtype = tuple(about.size), about.properties.given[0]
        chunks = tuple(
            _chunk(folder, _box(chunk), stored[name, tuple(chunk.offsets)])
            for chunk in about.chunks
        )
        _check_whole(name, shape, chunks)
        yield name, FolderEntry(path, shape, dtype, chunks)


def _box(chunk: Any) -> Box:
    starts, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    return Box(starts, tuple(a + b for a, b in zip(starts, sizes, strict=True)))


def _chunk(folder: Path, box: Box, info: Any) -> FolderChunk:
    name = str(info.relative_path)
    if Path(name).name != name:
        raise ShardwiseError(f"{name!r} must be a file beside it")
    return FolderChunk(box, folder / name, int(info.offset), int(info.length))


def _check_whole(name: str, shape: tuple[int, ...], chunks: tuple[FolderChunk, ...]) -> None:
    whole = Box.whole(shape)
    if any(len(c.box.starts) != len(shape) or not whole.contains(c.box) for c in chunks):
        raise ShardwiseError(f"a chunk of {name!r} reaches beyond it")
    if sum(chunk.box.numel for chunk in chunks) != whole.numel:
        raise ShardwiseError(f"the chunks of {name!r} do not hold each element once")


def _loaded(chunk: FolderChunk) -> Any:
    """What torch.save wrote there; nothing pickled is run."""
    with system_errors_as(f"{chunk.file} cannot be read"), chunk.file.open("rb") as file:
        file.seek(chunk.offset)
        content = file.read(chunk.length)
    if len(content) != chunk.length:
        raise ShardwiseError(f"{chunk.file} is cut off")
    try:
        return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ShardwiseError(f"{chunk.file} is damaged: {one_line(error)}") from None


def tensor_readers(folder: DcpFolder) -> dict[str, tuple[tuple[int, ...], torch.dtype, Any]]:
    """The tensors of the model in it: shape, dtype and how a box is read, by their names.

    They lie under `model` (or `state_dict`), as torch's examples have it, or alone.
    """
    found = folder.below("model", "state_dict", "module")
    if not found:
        found = {entry.path: entry for entry in folder.entries.values() if len(entry.path) == 1}
    tensors = {}
    for path, entry in found.items():
        if entry.shape is not None and entry.dtype is not None:
            name = ".".join(map(str, path)).removeprefix("module.")
            tensors[name] = (entry.shape, entry.dtype, partial(FolderEntry.read, entry))
    if not tensors:
        raise ShardwiseError(f"{folder.place} holds no weights, alone or under 'model'")
    return tensors
