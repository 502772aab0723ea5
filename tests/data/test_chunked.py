"""HDF5 files: the arrays that were written, in part; damage is named with its file."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from datafiles import assert_same
from shardwise.data import Hdf5, open_source
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box


def write_hdf5(path: Path, num: int, seed: int = 0, **layout: object) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((num, 2, 9, 8)).astype(np.float32)
    labels = rng.integers(0, 4, (num, 9, 8))
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, **layout)
        file.create_dataset("labels", data=labels)
    return images, labels


def test_a_file_gives_its_arrays_and_counts_what_is_read(tmp_path: Path) -> None:
    images, labels = write_hdf5(tmp_path / "one.h5", 5)
    source = open_source(tmp_path / "one.h5", num_classes=4)
    assert_same(source, images, labels)
    before = source.bytes_read
    source.read(2, Box((0, 0, 0), (2, 3, 8)))
    assert source.bytes_read - before == 2 * 3 * 8 * 4  # the box: there are no chunks
    chunked = {"chunks": (1, 1, 4, 4), "compression": "gzip"}
    images, labels = write_hdf5(tmp_path / "two.hdf5", 3, **chunked)
    source = open_source(tmp_path / "two.hdf5", num_classes=4)
    assert_same(source, images, labels)
    before = source.bytes_read
    source.read(2, Box((0, 0, 0), (1, 3, 8)))
    assert source.bytes_read - before == 2 * 4 * 4 * 4


def test_files_of_a_folder_are_in_a_row_and_may_be_uneven(tmp_path: Path) -> None:
    parts = [write_hdf5(tmp_path / f"all/{n}.h5", n, seed=n) for n in (3, 4, 5)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    source = open_source(tmp_path / "all", num_classes=4)
    assert isinstance(source, Hdf5)
    assert_same(source, images, labels)
    assert source.where(3) == f"sample 0 of {tmp_path / 'all/4.h5'}"


def test_single_labels_are_counted_over_all_files(tmp_path: Path) -> None:
    for number, labels in enumerate(([0, 1], [2, 6, 1])):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["images"], file["labels"] = np.zeros((len(labels), 1, 2, 2), np.uint8), labels
    source = open_source(tmp_path)
    assert len(source.classes) == 7 and [source.label(n) for n in range(5)] == [0, 1, 2, 6, 1]
    assert source.scale == 1 / 255


def test_a_file_that_is_cut_off_or_none_is_named(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "x.h5", 5)
    content = (tmp_path / "x.h5").read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "x.h5").write_bytes(content[:length])
        with pytest.raises(ShardwiseError, match=r"x.h5 is no HDF5 file that can be read"):
            open_source(tmp_path / "x.h5", num_classes=4)
    with pytest.raises(ShardwiseError, match=r"there is no .*none.h5"):
        open_source(tmp_path / "none.h5")


def test_a_chunk_that_is_damaged_is_named_with_its_sample(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "x.h5", 3, chunks=(1, 2, 9, 8), fletcher32=True)
    with h5py.File(tmp_path / "x.h5") as file:
        place = file["images"].id.get_chunk_info(1).byte_offset
    content = bytearray((tmp_path / "x.h5").read_bytes())
    content[place + 9] ^= 255
    (tmp_path / "x.h5").write_bytes(content)
    source = open_source(tmp_path / "x.h5", num_classes=4)
    source.read(0)
    with pytest.raises(ShardwiseError, match=r"sample 1 of .*x.h5 cannot be read: OSError"):
        source.read(1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"images": np.zeros((2, 1, 3))}, "has no dataset 'labels'; it has images"),
        ({"images": np.zeros((2, 1, 3)), "labels": np.zeros(3, int)}, "2 images and 3 labels"),
        ({"images": np.zeros((2, 1, 3)), "labels": np.zeros(2)}, "float64, and not integers"),
        ({"images": ["a", "b"], "labels": np.zeros(2, int)}, "object, and not numbers"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, content: dict, words: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, value in content.items():
            file[name] = value
    with pytest.raises(ShardwiseError, match=rf"x.h5.*{words}"):
        open_source(tmp_path / "x.h5")


def test_files_of_a_folder_must_be_alike(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "a.h5", 2)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"], file["labels"] = (
            np.zeros((2, 2, 9, 7), np.float32),
            np.zeros((2, 9, 7), int),
        )
    with pytest.raises(ShardwiseError, match=r"images of .*b.h5 are 2x9x7 of float32 each, and"):
        open_source(tmp_path, num_classes=4)
