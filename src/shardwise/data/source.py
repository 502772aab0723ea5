"""A source: numbered samples of one shape with labels, of which any box can be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box

KINDS = "biuf"  # the kinds of numbers a sample may be made of; an object would need pickle
LABEL_KINDS = "iu"
MAX_ITEM_BYTES = 8  # longer floats differ between machines
ON_ERROR = ("raise", "skip")
SUBSETS = ("train", "test", "all")


class Source(ABC):
    """Samples of shape channels x space, each with a label: a class, or a class per voxel.

    A subclass sets the attributes and reads; the checks of what was asked for, and of labels, are
    made here, once for all.
    """

    name: str  # what a message calls it: a path, most often
    shape: tuple[int, ...]  # of a sample
    dtype: np.dtype  # of the numbers as they are kept
    classes: tuple[str, ...]
    label_shape: tuple[int, ...] = ()  # of a label: empty, or the shape of the sample's space
    scale: float = 1.0  # brings the numbers to about 0 to 1
    bytes_read: int = 0  # so far, of samples and labels; what a compressed file holds, if it is one

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, index: int, box: Box) -> np.ndarray:
        """This box of a sample; counts the bytes it had to read."""

    @abstractmethod
    def _read_label(self, index: int, box: Box) -> np.ndarray | int:
        """This box of a label, or the label itself where it is one number."""

    def expect(self, index: int, box: Box) -> None:  # noqa: B027, most have nothing to do
        """Says that this box of a sample will be read soon; a source may have the disk begin."""

    def expect_label(self, index: int, box: Box) -> None:  # noqa: B027
        """The same for a label."""

    def where(self, index: int) -> str:
        """What a message calls a sample."""
        return f"sample {index} of {self.name}"

    def read(self, index: int, box: Box | None = None) -> np.ndarray:
        """A box of a sample, or all of it, as it is kept."""
        box = self._checked(index, box, self.shape)
        try:
            return self._read(index, box)
        except OSError as error:
            raise self._unreadable(index, error) from None

    def label(self, index: int, box: Box | None = None) -> np.ndarray | int:
        """A box of a sample's label, or all of it; every class is one of `classes`."""
        box = self._checked(index, box, self.label_shape)
        try:
            label = self._read_label(index, box)
        except OSError as error:
            raise self._unreadable(index, error) from None
        self._check_classes(index, label)
        return label

    def _check_classes(self, index: int, label: np.ndarray | int) -> None:
        if isinstance(label, int):
            lowest = highest = label
        elif label.size:
            lowest, highest = int(label.min()), int(label.max())
        else:
            return
        if lowest < 0 or highest >= len(self.classes):
            wrong = lowest if lowest < 0 else highest
            raise ShardwiseError(
                f"{self.where(index)} has label {wrong}, and labels are from 0 to "
                f"{len(self.classes) - 1}"
            )

    def _checked(self, index: int, box: Box | None, shape: tuple[int, ...]) -> Box:
        if not 0 <= index < len(self):
            raise ShardwiseError(f"{self.name} has {len(self)} samples, and no sample {index}")
        if box is None:
            return Box.whole(shape)
        if len(box.starts) != len(shape) or any(
            not 0 <= start <= stop <= size
            for start, stop, size in zip(box.starts, box.stops, shape, strict=True)
        ):
            raise ShardwiseError(
                f"{box} is not inside {self.where(index)}, which is {Box.whole(shape)}"
            )
        return box

    def _unreadable(self, index: int, error: OSError) -> ShardwiseError:
        return ShardwiseError(f"{self.where(index)} cannot be read: {error.strerror or error}")


class Subset(Source):
    """Some samples of a source, renumbered from 0.

    >>> from shardwise.data import Synthetic
    >>> len(Subset(Synthetic(10, (1, 4, 4)), [2, 3, 5]))
    3
    """

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        if len(self.indices) == 0:
            raise ShardwiseError(f"no sample of {source.name} is left")
        self.name, self.shape, self.dtype = source.name, source.shape, source.dtype
        self.classes, self.label_shape = source.classes, source.label_shape
        self.scale = source.scale

    def __len__(self) -> int:
        return len(self.indices)

    def where(self, index: int) -> str:
        return self.source.where(int(self.indices[index]))

    def expect(self, index: int, box: Box) -> None:
        self.source.expect(int(self.indices[index]), box)

    def expect_label(self, index: int, box: Box) -> None:
        self.source.expect_label(int(self.indices[index]), box)

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.source.bytes_read

    def _read(self, index: int, box: Box) -> np.ndarray:
        return self.source.read(int(self.indices[index]), box)

    def _read_label(self, index: int, box: Box) -> np.ndarray | int:
        return self.source.label(int(self.indices[index]), box)


def bad_samples(source: Source, indices: Iterable[int] | None = None) -> dict[int, str]:
    """The samples that cannot be read, and why; ranks may share the work by `indices`."""
    found = {}
    for index in range(len(source)) if indices is None else indices:
        try:
            source.read(index)
            source.label(index)
        except ShardwiseError as error:
            found[index] = str(error)
    return found


def without(source: Source, bad: Iterable[int]) -> Source:
    """The source without these samples; itself if there are none."""
    left_out = set(bad)
    if not left_out:
        return source
    return Subset(source, [index for index in range(len(source)) if index not in left_out])


def check_on_error(on_error: str) -> None:
    """Raises unless this says what to do about a sample that cannot be read."""
    if on_error not in ON_ERROR:
        raise ShardwiseError(f"on_error={on_error!r} must be {' or '.join(map(repr, ON_ERROR))}")


def check_subset(subset: str) -> None:
    """Raises unless this is a subset that a data set can have."""
    if subset not in SUBSETS:
        raise ShardwiseError(f"subset={subset!r} must be one of {', '.join(SUBSETS)}")


def optional(module: str, use: str, package: str) -> Any:
    """A module that need not be installed; where it is not, says what it is for."""
    try:
        return import_module(module)
    except ImportError:
        raise ShardwiseError(f"{use}, which is not installed: pip install {package!r}") from None


def class_names(num_classes: int) -> tuple[str, ...]:
    """The names of classes that have none: their numbers."""
    return tuple(map(str, range(num_classes)))


def times(shape: tuple[int, ...]) -> str:
    """A shape as messages write it."""
    return "x".join(map(str, shape)) or "a single number"
