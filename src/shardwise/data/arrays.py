"""Samples and labels in two arrays: in memory, memory-mapped `.npy` files, or the digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import ShardwiseError, one_line
from shardwise.geometry.box import Box

from .order import shuffled
from .source import (
    KINDS,
    LABEL_KINDS,
    MAX_ITEM_BYTES,
    Source,
    check_subset,
    class_names,
    optional,
    times,
)

IMAGES, LABELS = "images", "labels"
MAX_CLASSES = 1_000_000  # more is a slip: labels that are no classes
NUM_TEST = 360  # of the digits


class Arrays(Source):
    """Samples [number, channels, *space] and labels [number] or [number, *space].

    Anything that numpy's basic slices can cut will do, so that memory-mapped files and zarr arrays
    are read no further than they are asked for.
    """

    def __init__(
        self,
        images: Any,
        labels: Any,
        name: str,
        classes: tuple[str, ...] | None = None,
        num_classes: int | None = None,
        scale: float | None = None,
    ) -> None:
        self.name, self.images, self.labels = name, images, labels
        self._check()
        self.shape, self.dtype = tuple(images.shape[1:]), np.dtype(images.dtype)
        self.label_shape = tuple(labels.shape[1:])
        self.classes = classes or class_names(num_classes or self._count_classes())
        usual = 1 / 255 if self.dtype == np.uint8 else 1.0  # bytes are brightness, for everyone
        self.scale = usual if scale is None else scale

    def __len__(self) -> int:
        return int(self.images.shape[0])

    def _check(self) -> None:
        images, labels = self.images, self.labels
        kinds = ((images, KINDS, IMAGES, "numbers"), (labels, LABEL_KINDS, LABELS, "integers"))
        for array, allowed, what, right in kinds:
            dtype = np.dtype(array.dtype)
            if dtype.kind not in allowed or dtype.itemsize > MAX_ITEM_BYTES:
                raise ShardwiseError(f"{what} of {self.name} are {array.dtype}, and not {right}")
        if len(images.shape) < 3 or 0 in images.shape:
            raise ShardwiseError(
                f"images of {self.name} must be samples x channels x space, and are "
                f"{times(images.shape)}"
            )
        count, space = images.shape[0], tuple(images.shape[2:])
        if tuple(labels.shape) not in ((count,), (count, *space)):
            raise ShardwiseError(
                f"labels of {self.name} must be {count} or {times((count, *space))}, and are "
                f"{times(labels.shape)}"
            )

    def _count_classes(self) -> int:
        """One more than the highest label; labels that are volumes are too much to look through."""
        if self.label_shape:
            raise ShardwiseError(
                f"labels of {self.name} are volumes: say how many classes there are (num_classes)"
            )
        highest = int(np.max(self.labels[:]))
        if not 0 <= highest < MAX_CLASSES:
            raise ShardwiseError(f"{self.name} has label {highest}, which is no class")
        return highest + 1

    def _read(self, index: int, box: Box) -> np.ndarray:
        return self._cut(self.images, index, box)

    def _read_label(self, index: int, box: Box) -> np.ndarray | int:
        label = self._cut(self.labels, index, box)
        return label if self.label_shape else int(label)

    def _cut(self, array: Any, index: int, box: Box) -> np.ndarray:
        self.bytes_read += self._bytes_of(array, box)
        return array[(index, *map(slice, box.starts, box.stops))]

    def _bytes_of(self, array: Any, box: Box) -> int:
        return box.numel * array.dtype.itemsize


# -- .npy ------------------------------------------------------------------------------------------


def npy(folder: str | Path, num_classes: int | None = None) -> Arrays:
    """A folder with `images` and `labels`, each one memory-mapped .npy file, or a folder of many.

    In a folder every file is one sample, or one label that is a volume, in the order of the names.
    """
    paths = (Path(folder) / what for what in (IMAGES, LABELS))
    images, labels = (
        NpyFiles(path) if path.is_dir() else npy_file(path.with_name(f"{path.name}.npy"))
        for path in paths
    )
    return Arrays(images, labels, str(Path(folder)), num_classes=num_classes)


class NpyFiles:
    """Files of one array each, to be cut as if they were one array; opened when they are read."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.npy"))
        if not self.files:
            raise ShardwiseError(f"{folder} has no .npy files")
        first = npy_file(self.files[0])
        self.shape, self.dtype = (len(self.files), *first.shape), first.dtype

    def __getitem__(self, place: tuple[Any, ...]) -> np.ndarray:
        index, *box = place
        array = npy_file(self.files[index])
        if (array.shape, array.dtype) != (self.shape[1:], self.dtype):
            raise ShardwiseError(
                f"{self.files[index]} is {times(array.shape)} of {array.dtype}, and the first is "
                f"{times(self.shape[1:])} of {self.dtype}"
            )
        return array[tuple(box)]


def npy_file(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ShardwiseError(f"there is no {path}") from None
    except Exception as error:  # numpy evaluates the header as Python: it may fail in any way
        raise ShardwiseError(
            f"{path} is no .npy file that can be read: {one_line(error)}"
        ) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise ShardwiseError(f"{path} is an archive of arrays, and not one array")
    return np.asarray(array)  # a plain array is cut several times as fast as a np.memmap


# -- scikit-learn's digits -------------------------------------------------------------------------


def digits(subset: str = "train") -> Arrays:
    """The digits for training or for testing, always divided in the same way.

    >>> len(digits("train")), len(digits("test")), digits().shape
    (1437, 360, (1, 8, 8))
    """
    check_subset(subset)
    datasets = optional("sklearn.datasets", "the digits come with scikit-learn", "shardwise[train]")
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.asarray(pixels, dtype=np.uint8).reshape(-1, 1, 8, 8)
    order = shuffled(len(images), seed=0, epoch=0)
    chosen = {"test": order[:NUM_TEST], "train": order[NUM_TEST:], "all": np.sort(order)}[subset]
    name = "digits" if subset == "all" else f"digits ({subset})"
    return Arrays(images[chosen], labels[chosen], name, class_names(10), scale=1 / 16)
