"""Packing: any source into a store, which gets its name only when it is whole and on disk."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.files import sync, system_errors_as, write_whole

from .source import Source, check_on_error
from .store import HEADER, LABEL, LABELS, Description, Header, Stripe, stripe_name
from .tiles import tile_of

NUM_STRIPES = 32  # P5, section 5.2


def pack(
    source: Source,
    folder: str | Path,
    *,
    num_stripes: int = NUM_STRIPES,
    on_error: str = "raise",
    sample_done: Callable[[], None] = lambda: None,
) -> dict[int, str]:
    """Writes a store with the samples of a source; returns those left out, and why.

    A sample that cannot be read ends the packing, or, with on_error="skip", is left out. Whatever
    happens, there is a whole store under the name or none.
    """
    check_on_error(on_error)
    if num_stripes < 1:
        raise ShardwiseError(f"num_stripes={num_stripes} must be at least 1")
    folder = Path(folder)
    if folder.exists():
        raise ShardwiseError(f"{folder} exists already: a store is never overwritten")
    with system_errors_as(f"{folder} cannot be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            left_out = _Writer(source, unfinished, num_stripes).write(on_error, sample_done)
            unfinished.chmod(0o755)
            unfinished.rename(folder)
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return left_out


class _File:
    """A file that is being written, with its size and checksum so far."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("xb")
        self.bytes = self.crc32 = 0

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.bytes, self.crc32 = self.bytes + len(content), crc32(content, self.crc32)

    def close(self) -> Stripe:
        """Safe on disk, whatever happens next."""
        self.file.close()
        sync(Path(self.file.name))
        return Stripe(bytes=self.bytes, crc32=self.crc32)


class _Writer:
    """The files of a store that is being written."""

    def __init__(self, source: Source, folder: Path, num_stripes: int) -> None:
        self.source, self.folder = source, folder
        self.num_stripes = min(num_stripes, len(source))
        self.labels: list[int] = []
        self.description = describe(source)

    def write(self, on_error: str, sample_done: Callable[[], None]) -> dict[int, str]:
        stripes = [_File(self.folder / stripe_name(n)) for n in range(self.num_stripes)]
        left_out, num_samples = {}, 0
        try:
            for index in range(len(self.source)):
                try:
                    record = self._record(index, num_samples)
                except ShardwiseError as error:
                    if on_error == "raise":
                        raise
                    left_out[index] = str(error)
                else:
                    stripes[num_samples % self.num_stripes].write(record)
                    num_samples += 1
                sample_done()
            self._finish(stripes, num_samples)
        finally:
            for stripe in stripes:
                stripe.file.close()
        return left_out

    def _record(self, index: int, number: int) -> bytes:
        """The bytes of a sample that gets this number in the store."""
        image, label = self.source.read(index), self.source.label(index)
        start, label_start = self.description.starts(number)
        record = self.description.image.pack(image, start)
        if self.description.label is not None:
            return record + self.description.label.pack(np.asarray(label), label_start)
        self.labels.append(int(label))
        return record

    def _finish(self, files: list[_File], num_samples: int) -> None:
        """Labels and header, last of all; stripes that got no sample go."""
        if num_samples == 0:
            raise ShardwiseError(f"no sample of {self.source.name} can be read")
        sums = [file.close() for file in files[:num_samples]]
        for number in range(num_samples, len(files)):
            (self.folder / stripe_name(number)).unlink()
        labels = None
        if self.description.label is None:
            file = _File(self.folder / LABELS)
            file.write(np.array(self.labels, dtype=LABEL).tobytes())
            labels = file.close()
        description = self.description.model_dump()
        header = Header(**description, num_samples=num_samples, stripes=sums, labels=labels)
        write_whole(self.folder / HEADER, header.to_json())


def describe(source: Source) -> Description:
    """How the samples of a source will lie in a store."""
    return Description(
        source=source.name,
        shape=list(source.shape),
        tile=list(tile_of(source.shape, source.dtype.itemsize)),
        dtype=_little(source.dtype),
        scale=source.scale,
        classes=list(source.classes),
        label_shape=list(source.label_shape),
        label_dtype=_little(np.min_scalar_type(len(source.classes) - 1)),
        salt=secrets.randbits(32),
    )


def _little(dtype: np.dtype) -> str:
    return dtype.newbyteorder("<").str
