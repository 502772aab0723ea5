"""CIFAR-10's binary files: records of one byte of label and 3x32x32 bytes of image."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as
from shardwise.geometry.box import Box

from .source import Source, check_subset

SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


class Cifar10(Source):
    """The records of all files of a folder that belong to a subset, memory-mapped."""

    shape, dtype, classes, scale = SHAPE, np.dtype(np.uint8), CLASSES, 1 / 255

    def __init__(self, folder: str | Path, subset: str = "train") -> None:
        check_subset(subset)
        self.folder, self.name = Path(folder), str(folder)
        wanted = {"train": TRAIN, "test": TEST, "all": TRAIN + TEST}[subset]
        self.files = [self.folder / name for name in wanted if (self.folder / name).exists()]
        if not self.files:
            raise ShardwiseError(f"{folder} has none of {', '.join(wanted)}")
        self._records = [_open(path) for path in self.files]
        self._ends = np.cumsum([len(records) for records in self._records]).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, index: int) -> str:
        file, record = self._place(index)
        return f"record {record} of {self.files[file]}"

    def _place(self, index: int) -> tuple[int, int]:
        file = next(number for number, end in enumerate(self._ends) if index < end)
        return file, index - (self._ends[file - 1] if file else 0)

    def _read(self, index: int, box: Box) -> np.ndarray:
        file, record = self._place(index)
        self.bytes_read += box.numel
        image = self._records[file][record, 1:].reshape(SHAPE)
        return image[box.slices_in(Box.whole(SHAPE))]

    def _read_label(self, index: int, box: Box) -> int:
        file, record = self._place(index)
        self.bytes_read += 1
        return int(self._records[file][record, 0])


def _open(path: Path) -> np.ndarray:
    """The records of a file, which must end where a record ends."""
    with system_errors_as(f"{path} cannot be read"):
        size = path.stat().st_size
        if size and size % RECORD_BYTES == 0:
            return np.asarray(np.memmap(path, np.uint8, "r")).reshape(-1, RECORD_BYTES)
    raise ShardwiseError(
        f"{path} is {size} bytes, and no whole number of CIFAR-10 records of {RECORD_BYTES} bytes: "
        "it is cut off, or of another format"
    )
