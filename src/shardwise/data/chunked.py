"""Arrays that lie in chunks: zarr groups and HDF5 files, of which touched chunks are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import ShardwiseError, one_line
from shardwise.geometry.box import Box

from .arrays import IMAGES, LABELS, Arrays
from .source import optional, times

HDF5 = (".h5", ".hdf5")


class Chunked(Arrays):
    """Arrays whose libraries read whole chunks, which are counted, and may find them damaged."""

    def _count_classes(self) -> int:
        return self._decoded(super()._count_classes)

    def _cut(self, array: Any, index: int, box: Box) -> np.ndarray:
        return np.asarray(self._decoded(lambda: super(Chunked, self)._cut(array, index, box)))

    def _decoded(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ShardwiseError:
            raise
        except Exception as error:  # a codec may fail in any way on a damaged chunk
            raise ShardwiseError(f"{self.name} cannot be read: {one_line(error)}") from None

    def _bytes_of(self, array: Any, box: Box) -> int:
        """The chunks that the box touches, before compression; the box where there are none."""
        chunk = array.chunks
        if chunk is None:
            return super()._bytes_of(array, box)
        num_chunks = prod(
            -(-stop // size) - start // size
            for start, stop, size in zip(box.starts, box.stops, chunk[1:], strict=True)
        )
        return num_chunks * prod(chunk) * array.dtype.itemsize


# -- zarr ------------------------------------------------------------------------------------------


class Zarr(Chunked):
    """A zarr group with arrays `images` and `labels`.

    To zarr a missing chunk is one of zeros, so a lost file is not noticed; in a store it is.
    """

    def __init__(self, folder: str | Path, num_classes: int | None = None) -> None:
        images, labels = (_open_zarr(Path(folder), what) for what in (IMAGES, LABELS))
        super().__init__(images, labels, str(folder), num_classes=num_classes)


def _open_zarr(folder: Path, what: str) -> Any:
    zarr = optional("zarr", f"{folder} needs zarr", "shardwise[zarr]")
    try:
        array = zarr.open_group(str(folder), mode="r")[what]
        description = str(array.metadata.to_dict()).lower()
    except Exception as error:
        raise ShardwiseError(f"{folder} has no zarr array {what!r}: {one_line(error)}") from None
    if not isinstance(array, zarr.Array):
        raise ShardwiseError(f"{folder}/{what} is a zarr group, and not an array")
    if "pickle" in description:
        raise ShardwiseError(f"{folder}/{what} holds pickles, which are never loaded")
    return array


# -- HDF5 ------------------------------------------------------------------------------------------


class Hdf5(Chunked):
    """Datasets `images` and `labels` of one HDF5 file, or of all files of a folder, in a row.

    Files may have other numbers of samples each. A rank reads its box, with the chunks it touches.
    """

    def __init__(self, path: str | Path, num_classes: int | None = None) -> None:
        place = Path(path)
        files = hdf5_files(place) if place.is_dir() else [place]
        images, labels = (
            Joined([_open_hdf5(file, what) for file in files], files) for what in (IMAGES, LABELS)
        )
        for file, some, others in zip(files, images.arrays, labels.arrays, strict=True):
            if some.shape[:1] != others.shape[:1]:
                raise ShardwiseError(
                    f"{file} has {some.shape[0]} images and {others.shape[0]} labels"
                )
        super().__init__(images, labels, str(path), num_classes=num_classes)

    def where(self, index: int) -> str:
        number, inside = self.images.place(index)
        return f"sample {inside} of {self.images.files[number]}"

    def _cut(self, array: Any, index: int, box: Box) -> np.ndarray:
        number, inside = array.place(index)
        try:
            return super()._cut(array.arrays[number], inside, box)
        except ShardwiseError as error:
            reason = str(error).removeprefix(f"{self.name} cannot be read: ")
            raise ShardwiseError(f"{self.where(index)} cannot be read: {reason}") from None


class Joined:
    """Arrays of several files as one, in the order of the files."""

    def __init__(self, arrays: Sequence[Any], files: Sequence[Path]) -> None:
        self.arrays, self.files, first = arrays, files, arrays[0]
        for array, file in zip(arrays, files, strict=True):
            if (array.shape[1:], array.dtype) != (first.shape[1:], first.dtype):
                raise ShardwiseError(
                    f"{array.name.strip('/')} of {file} are {_kind(array)} each, and those of "
                    f"{files[0]} {_kind(first)}"
                )
        self._ends = np.cumsum([array.shape[0] for array in arrays]).tolist()
        self.shape, self.dtype = (self._ends[-1], *first.shape[1:]), first.dtype

    def place(self, index: int) -> tuple[int, int]:
        """The number of the file, and of the sample in it."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.concatenate([array[:] for array in self.arrays])[part]


def hdf5_files(folder: Path) -> list[Path]:
    """The HDF5 files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in HDF5)


def _open_hdf5(path: Path, what: str) -> Any:
    h5py = optional("h5py", f"{path} needs h5py", "shardwise[hdf5]")
    if not path.is_file():
        raise ShardwiseError(f"there is no {path}")
    try:
        file = h5py.File(path, "r")
        found = file.get(what)
    except Exception as error:
        raise ShardwiseError(
            f"{path} is no HDF5 file that can be read: {one_line(error)}"
        ) from None
    if not isinstance(found, h5py.Dataset) or not found.shape:
        names = ", ".join(sorted(file)) or "nothing"
        raise ShardwiseError(f"{path} has no dataset {what!r}; it has {names}")
    return found


def _kind(array: Any) -> str:
    return f"{times(array.shape[1:])} of {array.dtype}"
