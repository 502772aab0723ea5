"""Samples in tar files, as WebDataset lays them out: the files of a sample have one name.

`cat/001.jpg` and `cat/001.cls` are an image and its class; `.npy` is an array, and `.seg.npy` a
class per voxel. What is pickled is refused.
"""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np

from shardwise.errors import ShardwiseError, one_line
from shardwise.files import system_errors_as
from shardwise.geometry.box import Box

from .pictures import SUFFIXES, check_channels, decoded
from .source import KINDS, LABEL_KINDS, MAX_ITEM_BYTES, Source, class_names, times

ARRAY, CLASS, MASK = ".npy", ".cls", ".seg.npy"
IMAGES = {*SUFFIXES, ARRAY}
PICKLED = {".pyd", ".pickle", ".pkl", ".pth", ".pt"}
BLOCK = 512
MOST_DIGITS = 9  # of a class


@dataclass(frozen=True)
class Member:
    """A file within a tar."""

    tar: Path
    name: str
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} of {self.tar}"

    def read(self) -> bytes:
        with system_errors_as(f"{self} cannot be read"), self.tar.open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.num_bytes)
        if len(content) < self.num_bytes:
            raise ShardwiseError(f"{self} is cut off")
        return content

    def array(self) -> np.ndarray:
        """An array that is mapped, and so read no further than it is cut."""
        try:
            with self.tar.open("rb") as file:
                file.seek(self.offset)
                head = BytesIO(file.read(min(self.num_bytes, 1 << 16)))
            version = np.lib.format.read_magic(head)
            reader = {1: "read_array_header_1_0", 2: "read_array_header_2_0"}[version[0]]
            shape, fortran, dtype = getattr(np.lib.format, reader)(head)
            if dtype.kind not in KINDS or dtype.itemsize > MAX_ITEM_BYTES:
                raise ShardwiseError(f"{self} is {dtype}, and not numbers")
            if head.tell() + int(np.prod(shape)) * dtype.itemsize > self.num_bytes:
                raise ValueError("it is shorter than it says")
            order, start = "F" if fortran else "C", self.offset + head.tell()
            return np.asarray(np.memmap(self.tar, dtype, "r", start, shape, order))
        except ShardwiseError:
            raise
        except Exception as error:  # numpy evaluates the header as Python: it may fail in any way
            raise ShardwiseError(
                f"{self} is no .npy file that can be read: {one_line(error)}"
            ) from None


@dataclass
class Sample:
    """The files of a sample, by what follows the first dot of their names."""

    key: str
    tar: Path
    files: dict[str, Member] = field(default_factory=dict)

    def only(self, kinds: set[str], what: str) -> tuple[str, Member]:
        found = [kind for kind in self.files if kind in kinds]
        if len(found) != 1:
            raise ShardwiseError(
                f"sample {self.key!r} of {self.tar} has {' and '.join(found) or 'no ' + what}; it "
                f"needs one of {', '.join(sorted(kinds))}"
            )
        return found[0], self.files[found[0]]


class Tars(Source):
    """The samples of tar files, in the order in which they lie there.

    `spec` is a tar, a folder of tars, or many in short: `train-{000..146}.tar`. Tars are not
    unpacked: their members are found once, at the start, and read where they lie, arrays in part.
    """

    def __init__(
        self,
        spec: str | Path,
        num_classes: int | None = None,
        size: tuple[int, int] | None = None,
        channels: int = 3,
    ) -> None:
        check_channels(channels)
        self.name, self.size, self.channels = str(spec), size, channels
        samples = [sample for tar in tar_files(spec) for sample in _indexed(tar)]
        if not samples:
            raise ShardwiseError(f"{spec} has no samples: files such as 001.jpg and 001.cls")
        self._images = [sample.only(IMAGES, "image") for sample in samples]
        self._labels = [sample.only({CLASS, MASK}, "label") for sample in samples]
        kinds = {kind for kind, _ in self._labels}
        if len(kinds) > 1:
            raise ShardwiseError(f"{spec} has labels of both kinds, {CLASS} and {MASK}")
        self._classes = [_class_of(file) for kind, file in self._labels if kind == CLASS]
        self.classes = class_names(num_classes or self._count_classes())
        self.shape, self.dtype = (), np.dtype(np.uint8)  # so that the first may have any
        first = self._whole(0)
        self.shape, self.dtype = first.shape, first.dtype
        self.label_shape = () if self._classes else self.shape[1:]
        self.scale = 1 / 255 if self.dtype == np.uint8 else 1.0

    def __len__(self) -> int:
        return len(self._images)

    def where(self, index: int) -> str:
        return str(self._images[index][1])

    def _count_classes(self) -> int:
        if not self._classes:
            raise ShardwiseError(
                f"labels of {self.name} are volumes: say how many classes there are (num_classes)"
            )
        return max(self._classes) + 1

    def _read(self, index: int, box: Box) -> np.ndarray:
        part = self._whole(index)[box.slices_in(Box.whole(self.shape))]
        if self._images[index][0] == ARRAY:
            self.bytes_read += part.nbytes
        return part

    def _read_label(self, index: int, box: Box) -> np.ndarray | int:
        if self._classes:
            return self._classes[index]
        file = self._labels[index][1]
        mask = file.array()
        if mask.shape != self.label_shape or mask.dtype.kind not in LABEL_KINDS:
            raise ShardwiseError(
                f"{file} is {_kind(mask)}, and must be integers of {times(self.label_shape)}"
            )
        part = mask[box.slices_in(Box.whole(self.label_shape))]
        self.bytes_read += part.nbytes
        return part

    def _whole(self, index: int) -> np.ndarray:
        """A sample; an array is only mapped."""
        kind, file = self._images[index]
        if kind != ARRAY:
            content = file.read()
            self.bytes_read += len(content)
            check = lambda size: self._check(file, (self.channels, *size), self.dtype)  # noqa: E731
            return decoded(content, str(file.tar / file.name), self.channels, self.size, check)
        array = file.array()
        if self.size is not None or array.ndim < 2 or 0 in array.shape:
            wrong = "cannot be resized" if self.size else "must be channels x space"
            raise ShardwiseError(f"{file} is an array of {times(array.shape)}, and {wrong}")
        self._check(file, array.shape, array.dtype)
        return array

    def _check(self, file: Member, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if self.shape and self.size is None and (shape, dtype) != (self.shape, self.dtype):
            raise ShardwiseError(
                f"{file} is {times(shape)} of {dtype}, and the first is {times(self.shape)} of "
                f"{self.dtype}; images can be given one size"
            )


# -- finding ---------------------------------------------------------------------------------------


def tar_files(spec: str | Path) -> list[Path]:
    """The tars that are meant.

    >>> [path.name for path in tar_files("train-{08..10}.tar")]
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    found = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", str(spec))
    if found is None:
        path = Path(spec)
        return sorted(path.glob("*.tar")) if path.is_dir() else [path]
    before, first, last, after = found.groups()
    numbers = range(int(first), int(last) + 1)
    if not numbers or len(numbers) > 10**6:
        raise ShardwiseError(f"{spec} must go from a number to a larger one, at most a million")
    return [Path(f"{before}{number:0{len(first)}d}{after}") for number in numbers]


def _indexed(path: Path) -> list[Sample]:
    """The samples of a tar, which must be whole."""
    if not path.is_file():
        raise ShardwiseError(f"there is no {path}")
    try:
        with tarfile.open(path, "r:") as tar:
            members = [member for member in tar if member.isreg()]
            end = tar.offset
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        raise ShardwiseError(
            f"{path} is no tar that can be read (a compressed one must be unpacked): {error}"
        ) from None
    with path.open("rb") as file:  # tarfile takes whatever is no header for the end
        file.seek(end)
        tail = file.read(BLOCK)
    if len(tail) < BLOCK or any(tail):
        raise ShardwiseError(f"{path} is damaged or cut off after {end} bytes")
    samples: dict[str, Sample] = {}
    for member in members:
        _put(samples, path, member)
    return [sample for sample in samples.values() if sample.files]


def _put(samples: dict[str, Sample], path: Path, member: tarfile.TarInfo) -> None:
    """Puts a file to the sample of its name."""
    folder, _, name = member.name.rpartition("/")
    stem, dot, kind = name.partition(".")
    kind = f".{kind.lower()}"
    file = Member(path, member.name, member.offset_data, member.size)
    if not stem or not dot:
        return
    if f".{kind.rpartition('.')[2]}" in PICKLED:
        raise ShardwiseError(f"{file} is a pickle, or made of one, which is never loaded")
    if kind not in (*IMAGES, CLASS, MASK):
        return  # such as .json and .txt: about the sample, and no part of it
    if member.issparse():
        raise ShardwiseError(f"{file} has holes, which are not read")
    key = f"{folder}/{stem}" if folder else stem
    sample = samples.setdefault(key, Sample(key, path))
    if kind in sample.files:
        raise ShardwiseError(f"{path} has {member.name} twice")
    sample.files[kind] = file


def _class_of(file: Member) -> int:
    text = file.read().strip() if file.num_bytes <= 64 else b""
    if not text.isdigit() or len(text) > MOST_DIGITS:
        raise ShardwiseError(f"{file} must hold the number of a class")
    return int(text)


def _kind(array: np.ndarray) -> str:
    return f"{times(array.shape)} of {array.dtype}"
