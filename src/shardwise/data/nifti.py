"""Volumes in NIfTI files, one per sample, read through nibabel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import ShardwiseError, one_line
from shardwise.geometry.box import Box

from .arrays import npy_file
from .source import KINDS, LABEL_KINDS, Source, class_names, optional, times

FOLDERS = (("images", "labels"), ("imagesTr", "labelsTr"))
SUFFIXES = (".nii.gz", ".nii")


class Nifti(Source):
    """Files of `images`, and beside them of `labels` by the same names, or one `labels.npy`.

    A file is x x y x z, or x x y x z x channels; a sample has its channels first. Of a .nii file a
    rank reads its box; a .nii.gz is decompressed from its beginning up to the box: unpack it, or
    pack a store, where that is too much. Numbers are scaled as the file says, to float32.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, folder: str | Path, num_classes: int | None = None) -> None:
        self.folder, self.name = Path(folder), str(folder)
        images, labels = next(
            (pair for pair in FOLDERS if (self.folder / pair[0]).is_dir()), FOLDERS[0]
        )
        self.files = nifti_files(self.folder / images)
        if not self.files:
            raise ShardwiseError(f"{self.folder / images} has no .nii or .nii.gz files")
        self._space, channels = _sizes(_opened(self.files[0]).shape, self.files[0])
        self.shape = (channels, *self._space)
        masks = self.folder / labels
        self._masks = self._paired(masks) if masks.is_dir() else None
        self._labels = None if self._masks else self._numbers(masks.with_name(f"{labels}.npy"))
        self.label_shape = self._space if self._masks else ()
        if self._masks and num_classes is None:
            raise ShardwiseError(
                f"labels of {folder} are volumes: say how many classes there are (num_classes)"
            )
        highest = 0 if self._labels is None else int(self._labels.max())
        self.classes = class_names(num_classes or highest + 1)

    def __len__(self) -> int:
        return len(self.files)

    def where(self, index: int) -> str:
        return str(self.files[index])

    def _paired(self, masks: Path) -> list[Path]:
        """The label of every image: the file of the same name."""
        found = {_stem(path): path for path in nifti_files(masks)}
        for path in self.files:
            if _stem(path) not in found:
                raise ShardwiseError(f"{path} has no label {_stem(path)}.nii(.gz) in {masks}")
        return [found[_stem(path)] for path in self.files]

    def _numbers(self, path: Path) -> np.ndarray:
        labels = np.array(npy_file(path))
        if labels.shape != (len(self.files),) or labels.dtype.kind not in LABEL_KINDS:
            raise ShardwiseError(
                f"{path} must be {len(self.files)} integers, one per image, and is "
                f"{'x'.join(map(str, labels.shape)) or 'a single number'} of {labels.dtype}"
            )
        return labels

    def _read(self, index: int, box: Box) -> np.ndarray:
        path = self.files[index]
        return self._cut(_opened(path), path, box, self.shape).astype(np.float32)

    def _read_label(self, index: int, box: Box) -> np.ndarray | int:
        if self._masks is None:
            assert self._labels is not None
            self.bytes_read += self._labels.itemsize
            return int(self._labels[index])
        path, whole = self._masks[index], Box((0, *box.starts), (1, *box.stops))
        mask, image = _opened(path), _opened(self.files[index])
        if not np.allclose(mask.affine, image.affine, rtol=1e-3, atol=1e-2):
            raise ShardwiseError(f"{path} has another affine than {self.files[index]}")
        part = self._cut(mask, path, whole, (1, *self._space))[0]
        classes = part.astype(np.int64)
        if not np.array_equal(classes, part):
            raise ShardwiseError(f"{path} has labels that are no whole numbers")
        return classes

    def _cut(self, image: Any, path: Path, box: Box, shape: tuple[int, ...]) -> np.ndarray:
        """A box [channels, x, y, z] of a file, as numbers that are scaled."""
        space, channels = _sizes(image.shape, path)
        if (channels, *space) != shape:
            raise ShardwiseError(
                f"{path} is {times((channels, *space))}, and by the first image it should be "
                f"{times(shape)}"
            )
        place = tuple(map(slice, box.starts[1:], box.stops[1:]))
        if len(image.shape) > 3:
            place += (slice(box.starts[0], box.stops[0]),)
        try:
            part = np.asarray(image.dataobj[place])
        except Exception as error:  # decompression may fail in any way on a damaged file
            raise _damaged(path, error) from None
        own = box.numel * image.get_data_dtype().itemsize
        self.bytes_read += path.stat().st_size if path.suffix == ".gz" else own
        part = np.moveaxis(part, -1, 0) if len(image.shape) > 3 else part[None]
        return part[: box.stops[0] - box.starts[0]]


def nifti_files(folder: Path) -> list[Path]:
    """The NIfTI files of a folder, by name; none where there is no such folder."""
    if not folder.is_dir():
        return []
    files = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in files if path.name.endswith(SUFFIXES))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".nii")


def _opened(path: Path) -> Any:
    """The header of a file, which must be as long as it says."""
    nibabel = optional("nibabel", f"{path} needs nibabel", "shardwise[nifti]")
    try:
        image = nibabel.load(path)
        data = image.dataobj
        end = data.offset + int(np.prod(data.shape)) * data.dtype.itemsize
        size = path.stat().st_size
    except Exception as error:
        raise _damaged(path, error) from None
    if image.get_data_dtype().kind not in KINDS:
        raise ShardwiseError(f"{path} has voxels of {image.get_data_dtype()}, and not numbers")
    if path.suffix == ".nii" and size < end:
        raise ShardwiseError(f"{path} is {size} bytes and should be {end}: it is cut off")
    return image


def _sizes(shape: tuple[int, ...], path: Path) -> tuple[tuple[int, ...], int]:
    """Space and channels."""
    if len(shape) not in (3, 4) or 0 in shape:
        raise ShardwiseError(f"{path} is {times(shape)}, and not x x y x z (x channels)")
    return tuple(map(int, shape[:3])), int(shape[3]) if len(shape) == 4 else 1


def _damaged(path: Path, error: Exception) -> ShardwiseError:
    return ShardwiseError(f"{path} is no NIfTI file that can be read: {one_line(error)}")
