"""A store: samples packed into memory-mapped stripes, each part with a checksum.

A store is a folder. `store.json` describes it; sample i is record i // S of stripe i % S, where S
is the number of stripes: every batch is read from many files, which may lie on many disks (P5,
section 5.2, deals blocks of 256 MB in the same way; ours are single samples, since reading is
shuffled). A record is the sample's tiles and, where labels are volumes, the label's (see
`tiles.py`); labels that are single numbers lie in `labels.bin`, since every rank needs all of them.
"""

from __future__ import annotations

import mmap
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal
from zlib import crc32

import numpy as np
from pydantic import Field, model_validator

from shardwise.errors import ShardwiseError
from shardwise.files import Checked, Strict, system_errors_as
from shardwise.geometry.box import Box

from .source import Source, check_on_error
from .tiles import Damaged, Tiling

HEADER, LABELS = "store.json", "labels.bin"
LABEL = np.dtype("<i8")
CHUNK_BYTES = 2**24

Size = Annotated[int, Field(ge=1, le=2**40)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]
Number = Annotated[str, Field(pattern=r"^(\|[bui]1|<[uif][248])$")]  # as numpy writes it


class Stripe(Strict):
    """The checksum of one file."""

    bytes: Size
    crc32: Checksum


class Description(Strict):
    """What the samples of a store are, and how they are laid out."""

    source: str
    shape: list[Size] = Field(min_length=2)
    tile: list[Size]
    dtype: Number
    scale: float
    classes: list[str] = Field(min_length=1)
    label_shape: list[Size]
    label_dtype: Number
    salt: Checksum  # what checksums start from: a stripe of another store does not fit

    @model_validator(mode="after")
    def _fits(self) -> Description:
        if self.label_shape not in ([], self.shape[1:]) or len(self.tile) != len(self.shape):
            raise ValueError("shape, tile and label_shape do not fit each other")
        return self

    @cached_property
    def image(self) -> Tiling:
        return Tiling(tuple(self.shape), tuple(self.tile), np.dtype(self.dtype))

    @cached_property
    def label(self) -> Tiling | None:
        """The tiles of a label that is a volume: those of the sample."""
        if not self.label_shape:
            return None
        return Tiling(tuple(self.label_shape), tuple(self.tile[1:]), np.dtype(self.label_dtype))

    @cached_property
    def record_bytes(self) -> int:
        return self.image.num_bytes + (self.label.num_bytes if self.label else 0)

    def starts(self, index: int) -> tuple[int, int]:
        """What a sample's and its label's checksums start from: neighbours never share one."""
        per_image = 1 + self.image.num_tiles
        per_sample = per_image + (1 + self.label.num_tiles if self.label else 0)
        start = self.salt + index * per_sample
        return start & 0xFFFFFFFF, (start + per_image) & 0xFFFFFFFF


class Header(Description, Checked):
    """What `store.json` says: a description, and the files."""

    what, indent = "the header of a store", 1

    format: Literal["shardwise store"] = "shardwise store"
    version: Literal[1] = 1
    num_samples: Size
    stripes: list[Stripe] = Field(min_length=1)
    labels: Stripe | None  # where labels are single numbers

    @model_validator(mode="after")
    def _has_labels(self) -> Header:
        if (self.labels is None) != bool(self.label_shape):
            raise ValueError("labels is for labels that are single numbers")
        return self

    def num_records(self, stripe: int) -> int:
        return len(range(stripe, self.num_samples, len(self.stripes)))


def stripe_name(number: int) -> str:
    return f"stripe-{number:05d}.bin"


class Store(Source):
    """A packed store, open for reading; what is read is checked.

    A stripe that is missing or cut off is an error at once, or, with on_error="skip", when one of
    its samples is read.
    """

    def __init__(self, folder: str | Path, on_error: str = "raise") -> None:
        check_on_error(on_error)
        self.folder, self.name = Path(folder), str(folder)
        self.header = header = Header.load(self.folder / HEADER)
        self.shape, self.dtype = tuple(header.shape), np.dtype(header.dtype)
        self.classes, self.scale = tuple(header.classes), header.scale
        self.label_shape = tuple(header.label_shape)
        self._maps: dict[int, mmap.mmap] = {}
        self._stripes = [self._open_stripe(n, on_error) for n in range(len(header.stripes))]
        self._labels = self._open_labels(header.labels) if header.labels else None

    def __len__(self) -> int:
        return self.header.num_samples

    def where(self, index: int) -> str:
        stripe = self.folder / stripe_name(index % len(self._stripes))
        return f"sample {index} (record {index // len(self._stripes)} of {stripe})"

    def check(self) -> None:
        """Reads every stripe and raises at the first that does not have its checksum."""
        for number, stripe in enumerate(self.header.stripes):
            content, found = self._records(number).ravel(), 0
            for first in range(0, len(content), CHUNK_BYTES):
                found = crc32(content[first : first + CHUNK_BYTES].data, found)
            if found != stripe.crc32:
                path = self.folder / stripe_name(number)
                raise ShardwiseError(f"{path} is damaged: it does not have its checksum")

    def _open_stripe(self, number: int, on_error: str) -> np.ndarray | ShardwiseError:
        """The records of a stripe as bytes [records, bytes of a record]."""
        path, stripe = self.folder / stripe_name(number), self.header.stripes[number]
        num_records = self.header.num_records(number)
        wanted = num_records * self.header.record_bytes
        if wanted != stripe.bytes:
            raise ShardwiseError(f"{self.folder / HEADER} does not fit itself: {path.name}")
        try:
            content = _mapped(path, stripe.bytes)
        except ShardwiseError as error:
            if on_error == "raise":
                raise
            return error
        self._maps[number] = content
        return np.frombuffer(content, np.uint8).reshape(num_records, self.header.record_bytes)

    def _open_labels(self, labels: Stripe) -> np.ndarray:
        path = self.folder / LABELS
        content = _mapped(path, labels.bytes)
        if crc32(content) != labels.crc32 or labels.bytes != len(self) * LABEL.itemsize:
            raise ShardwiseError(f"{path} is damaged: it does not have its checksum")
        return np.frombuffer(content, LABEL)

    def _records(self, number: int) -> np.ndarray:
        stripe = self._stripes[number]
        if isinstance(stripe, ShardwiseError):
            raise ShardwiseError(str(stripe))
        return stripe

    def _record(self, index: int) -> np.ndarray:
        return self._records(index % len(self._stripes))[index // len(self._stripes)]

    def expect(self, index: int, box: Box) -> None:
        self._begin(self.header.image, 0, index, box)

    def expect_label(self, index: int, box: Box) -> None:
        if self.header.label is not None:
            self._begin(self.header.label, self.header.image.num_bytes, index, box)

    def _begin(self, tiling: Tiling, offset: int, index: int, box: Box) -> None:
        """Has the system read a box, and only that, while others are being dealt with.

        From a cold disk this gave 8 to 14 times the samples per second of reading page by page, and
        more than letting the system guess, which read the whole of every sample.
        """
        content = self._maps.get(index % len(self._stripes))
        if content is None or tiling.num_tiles == 1 or not hasattr(content, "madvise"):
            return
        start = index // len(self._stripes) * self.header.record_bytes + offset
        for first, last in tiling.runs(box):
            page = (start + first) // mmap.PAGESIZE * mmap.PAGESIZE
            content.madvise(mmap.MADV_WILLNEED, page, start + last - page)

    def _read(self, index: int, box: Box) -> np.ndarray:
        image = self.header.image
        packed = self._record(index)[: image.num_bytes]
        return self._part(image, packed, index, box, self.header.starts(index)[0])

    def _read_label(self, index: int, box: Box) -> np.ndarray | int:
        if self._labels is not None:
            self.bytes_read += LABEL.itemsize
            return int(self._labels[index])
        tiling = self.header.label
        assert tiling is not None
        packed = self._record(index)[self.header.image.num_bytes :]
        return self._part(tiling, packed, index, box, self.header.starts(index)[1])

    def _part(
        self, tiling: Tiling, packed: np.ndarray, index: int, box: Box, start: int
    ) -> np.ndarray:
        try:
            part, num_bytes = tiling.read(packed, box, start)
        except Damaged:
            raise ShardwiseError(
                f"{self.where(index)} is damaged: it does not have its checksum"
            ) from None
        self.bytes_read += num_bytes
        return part


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    """A whole file of exactly this size; a file cut off later would end the process, unseen."""
    with system_errors_as(f"{path} cannot be read"), path.open("rb") as file:
        size = path.stat().st_size
        if size != num_bytes:
            raise ShardwiseError(f"{path} is {size} bytes and was {num_bytes}: it is damaged")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(content, "madvise"):
        content.madvise(mmap.MADV_RANDOM)  # else the system reads on, into what others will read:
        # it is told what to read, see Store.expect
    return content
