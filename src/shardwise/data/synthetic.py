"""Samples made of noise whose brightness tells the class: for trying things out and for timing."""

from __future__ import annotations

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box

from .source import Source, class_names

COARSE = 4  # blocks per dimension of a label that is a volume


class Synthetic(Source):
    """As many samples as you like, the same every time, with a class each or one per voxel.

    >>> Synthetic(100, (3, 32, 32)).read(7).shape
    (3, 32, 32)
    """

    dtype = np.dtype(np.uint8)
    scale = 1 / 255

    def __init__(
        self,
        num_samples: int,
        shape: tuple[int, ...],
        num_classes: int = 10,
        volumes: bool = False,
        seed: int = 0,
    ) -> None:
        if num_samples < 1 or len(shape) < 2 or min(shape) < 1:
            raise ShardwiseError(
                f"synthetic samples need a count, channels and space, such as 100x3x32x32, and "
                f"not {'x'.join(map(str, (num_samples, *shape)))}"
            )
        if not 1 <= num_classes <= 256:
            raise ShardwiseError(f"num_classes={num_classes} must be from 1 to 256")
        self.name, self.num_samples, self.shape, self.seed = "synthetic", num_samples, shape, seed
        self.classes = class_names(num_classes)
        self.label_shape = shape[1:] if volumes else ()

    def __len__(self) -> int:
        return self.num_samples

    def _read(self, index: int, box: Box) -> np.ndarray:
        noise = self._bits(index, 0).integers(0, 128, self.shape, dtype=np.uint8)
        steps = max(1, len(self.classes) - 1)
        brightness = np.asarray(127 * self._label(index) // steps, dtype=np.uint8)
        self.bytes_read += box.numel
        return (noise + brightness)[box.slices_in(Box.whole(self.shape))]

    def _read_label(self, index: int, box: Box) -> np.ndarray | int:
        label = self._label(index)
        if isinstance(label, int):
            return label
        self.bytes_read += box.numel * label.itemsize
        return label[box.slices_in(Box.whole(self.label_shape))]

    def _label(self, index: int) -> np.ndarray | int:
        if not self.label_shape:
            return index % len(self.classes)
        coarse = (COARSE,) * len(self.label_shape)
        label = self._bits(index, 1).integers(0, len(self.classes), coarse, dtype=np.int64)
        for dim, size in enumerate(self.label_shape):
            label = np.take(label, np.arange(size) * COARSE // size, axis=dim)
        return label

    def _bits(self, index: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, index, purpose))
