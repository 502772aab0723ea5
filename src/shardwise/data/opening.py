"""What a user writes for a data set, and the source it stands for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError

from .arrays import IMAGES, digits, npy
from .chunked import HDF5, Hdf5, Zarr, hdf5_files
from .cifar import TEST, TRAIN, Cifar10
from .image_folder import ImageFolder
from .nifti import FOLDERS, Nifti, nifti_files
from .source import Source, bad_samples, check_on_error, without
from .store import HEADER, Store
from .synthetic import Synthetic
from .tars import Tars

logger = logging.getLogger(__name__)
ZARR = (".zgroup", "zarr.json")


def open_source(
    spec: str | Path,
    *,
    subset: str | None = None,
    size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    on_error: str = "raise",
) -> Source:
    """The source of `digits`, `synthetic:100x3x32x32`, a file or a folder, told by what is in it.

    A folder is a store (store.json), CIFAR-10 (data_batch_1.bin), arrays (images.npy, or a folder
    images of .npy files, and labels alike), a zarr group (with images and labels), HDF5 files,
    NIfTI files (a folder images, and labels alike), tars, or images in one subfolder per class. A
    file is HDF5 (.h5) or a tar; train-{000..146}.tar are many.

    With on_error="skip", samples that cannot be read are named in a warning and left out. For that
    all are read once, here: ranks that found out while training would see different batches.

    >>> len(open_source("digits", subset="test"))
    360
    """
    source = open_lazily(spec, on_error, subset=subset, size=size, num_classes=num_classes)
    if on_error == "raise":
        return source
    bad = bad_samples(source)
    for reason in bad.values():
        logger.warning("left out: %s", reason)
    return without(source, bad)


def open_pair(
    spec: str | Path, test_spec: str | Path | None = None, **options: Any
) -> tuple[Source, Source | None]:
    """The samples to train on, and those to test on where there are any; see `open_source`.

    The digits and CIFAR-10 are divided already; so is a folder with subfolders train and test (or
    val). Other samples are all for training, and others for testing have to be named.

    >>> [len(source) for source in open_pair("digits")]
    [1437, 360]
    """
    folder, tests = Path(spec), test_spec
    subset = test_subset = None
    if str(spec) == "digits" or any((folder / name).exists() for name in (*TRAIN, *TEST)):
        subset = "train"
        if test_spec is None and (str(spec) == "digits" or (folder / TEST[0]).exists()):
            tests, test_subset = spec, "test"
    elif (folder / "train").is_dir():
        spec = folder / "train"
        found = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
        tests = test_spec or next(iter(found), None)
    if str(tests) == "digits":
        test_subset = "test"
    train = open_source(spec, subset=subset, **options)
    return train, tests if tests is None else open_source(tests, subset=test_subset, **options)


def check_alike(train: Source, test: Source) -> None:
    """Raises unless what is learned from one can be tested on the other."""
    for name in ("shape", "classes"):
        mine, theirs = getattr(train, name), getattr(test, name)
        if mine != theirs:
            raise ShardwiseError(
                f"{test.name} has {name} {theirs}, and {train.name}, which is trained on, {mine}"
            )


def open_lazily(spec: str | Path, on_error: str = "raise", **given: Any) -> Source:
    """The same, but a sample that cannot be read stays, and says so when it is read."""
    check_on_error(on_error)
    text = str(spec)
    options = {name: value for name, value in given.items() if value is not None}
    if text == "digits":
        return digits(**_only(options, text, "subset"))
    if text.startswith("synthetic:"):
        count, *shape = _numbers(text)
        return Synthetic(count, tuple(shape), **_only(options, text, "num_classes"))
    if text.endswith(HDF5) and not Path(spec).is_dir():
        return Hdf5(spec, **_only(options, text, "num_classes"))
    if text.endswith(".tar"):
        return Tars(spec, **_only(options, text, "num_classes", "size"))
    return _open_folder(Path(spec), on_error, options)


def _open_folder(folder: Path, on_error: str, options: dict[str, Any]) -> Source:
    if not folder.is_dir():
        raise ShardwiseError(
            f"{folder} is neither a folder, an HDF5 file or a tar, nor digits, nor "
            "synthetic:100x3x32x32 or the like"
        )

    def holds(*names: str) -> bool:
        return any((folder / name).exists() for name in names)

    kind = str(folder)
    if holds(HEADER):
        _only(options, kind)
        return Store(folder, on_error)
    if holds(*TRAIN, *TEST):
        return Cifar10(folder, **_only(options, kind, "subset"))
    if holds(f"{IMAGES}.npy") or next((folder / IMAGES).glob("*.npy"), None):
        return npy(folder, **_only(options, kind, "num_classes"))
    if holds(*ZARR):
        return Zarr(folder, **_only(options, kind, "num_classes"))
    if hdf5_files(folder):
        return Hdf5(folder, **_only(options, kind, "num_classes"))
    if any(nifti_files(folder / images) for images, _ in FOLDERS):
        return Nifti(folder, **_only(options, kind, "num_classes"))
    if next(folder.glob("*.tar"), None):
        return Tars(folder, **_only(options, kind, "num_classes", "size"))
    return ImageFolder(folder, **_only(options, kind, "size"))


def _only(options: dict[str, Any], what: str, *allowed: str) -> dict[str, Any]:
    """The options, which must all be for this kind of source: none is passed over in silence."""
    for name in options:
        if name not in allowed:
            raise ShardwiseError(f"{name} is no option of {what}")
    return options


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.removeprefix("synthetic:").split("x")]
    except ValueError:
        numbers = []
    if len(numbers) < 3:
        raise ShardwiseError(f"{text} must be like synthetic:100x3x32x32: samples, channels, space")
    return numbers
