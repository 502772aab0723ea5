"""A folder of images, one subfolder per class, read through Pillow."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as
from shardwise.geometry.box import Box

from .source import Source, optional

PILLOW = ("images are read with Pillow", "shardwise[train]")
SUFFIXES = {".jpg", ".jpeg", ".png"}
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}  # 8 bits a channel, or fewer


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
        if channels not in (1, 3):
            raise ShardwiseError(f"channels={channels} must be 3 (colour) or 1 (grey)")
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
        pillow, ops = (optional(f"PIL.{name}", *PILLOW) for name in ("Image", "ImageOps"))
        try:
            if path.suffix.lower() == ".png":
                pillow.open(BytesIO(content)).verify()  # checksums, which load() passes over
            image = pillow.open(BytesIO(content), formats=("JPEG", "PNG"))
            self._check_size(path, (image.height, image.width))  # before it takes memory
            image.load()
        except ShardwiseError:
            raise
        except Exception as error:  # a decoder may fail in any way on a damaged file
            raise ShardwiseError(f"{path} is no image that can be read: {error}") from None
        if image.mode not in MODES:
            raise ShardwiseError(f"{path} has pixels of kind {image.mode}, and not of 8 bits")
        image = image.convert("RGB" if self.channels == 3 else "L")
        if self.size is not None:
            height, width = self.size
            image = ops.fit(image, (width, height), pillow.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.uint8)
        return pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)
