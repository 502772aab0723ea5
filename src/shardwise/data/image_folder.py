"""A folder of images, one subfolder per class, read through Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as
from shardwise.geometry.box import Box

from .pictures import SUFFIXES, check_channels, decoded
from .source import Source


class ImageFolder(Source):
    """JPEG and PNG files; classes and files are in the order of their names.

    With `size`, images are resized and cut to it about their middle; without, all must be of the
    size of the first. A compressed image cannot be read in part: a box costs the whole file. Pack
    the folder where that is too much. A JPEG has no checksum: damage that still decodes is not
    noticed, whereas in a store it is.
    """

    dtype, scale = np.dtype(np.uint8), 1 / 255

    def __init__(
        self, folder: str | Path, size: tuple[int, int] | None = None, channels: int = 3
    ) -> None:
        check_channels(channels)
        self.folder, self.name, self.channels = Path(folder), str(folder), channels
        self.files = sorted(path for path in self._walk() if path.suffix.lower() in SUFFIXES)
        if not self.files:
            raise ShardwiseError(f"{folder} has no JPEG or PNG images in subfolders, one per class")
        of_file = [path.relative_to(self.folder).parts[0] for path in self.files]
        self.classes = tuple(sorted(set(of_file)))
        number = {name: index for index, name in enumerate(self.classes)}
        self._labels = [number[name] for name in of_file]
        self.size = size
        self.shape = ()  # so that the first image may have any
        self.shape = (channels, *(size or self._size_of_first()))

    def _walk(self) -> list[Path]:
        with system_errors_as(f"{self.folder} cannot be read"):
            below = [path for path in self.folder.iterdir() if path.is_dir()]
        return [path for folder in below for path in folder.rglob("*") if path.is_file()]

    def __len__(self) -> int:
        return len(self.files)

    def where(self, index: int) -> str:
        return str(self.files[index])

    def _read(self, index: int, box: Box) -> np.ndarray:
        return self._decoded(self.files[index])[box.slices_in(Box.whole(self.shape))]

    def _read_label(self, index: int, box: Box) -> int:
        return self._labels[index]

    def _size_of_first(self) -> tuple[int, int]:
        """The size of the first image that can be read."""
        problem = None
        for path in self.files:
            try:
                _, height, width = self._decoded(path).shape
                return height, width
            except ShardwiseError as error:
                problem = problem or error
        raise problem or AssertionError("a folder has files")

    def _check_size(self, path: Path, found: tuple[int, int]) -> None:
        if self.shape and self.size is None and found != self.shape[1:]:
            height, width = self.shape[1:]
            raise ShardwiseError(
                f"{path} is {found[0]}x{found[1]} pixels and others are {height}x{width}: give the "
                f"size that all are to have"
            )

    def _decoded(self, path: Path) -> np.ndarray:
        """The image of a file as channels x height x width."""
        with system_errors_as(f"{path} cannot be read"):
            content = path.read_bytes()
        self.bytes_read += len(content)
        return decoded(
            content, path, self.channels, self.size, lambda size: self._check_size(path, size)
        )
