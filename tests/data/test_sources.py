"""Sources: each kind of file gives the samples that were written, in whole and in part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datafiles import assert_same, write_cifar, write_images, write_npy
from shardwise.data import (
    Arrays,
    Cifar10,
    ImageFolder,
    Subset,
    Synthetic,
    Zarr,
    bad_samples,
    digits,
    npy,
    open_source,
    without,
)
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box


def test_cifar_gives_the_records_of_all_files(tmp_path: Path) -> None:
    images, labels = write_cifar(tmp_path / "cifar")
    assert_same(Cifar10(tmp_path / "cifar"), images, labels)
    assert_same(Cifar10(tmp_path / "cifar", "test"), images[:2], labels[:2])
    assert len(Cifar10(tmp_path / "cifar", "all")) == 14


def test_a_cifar_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar")
    path = tmp_path / "cifar" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ShardwiseError, match=r"data_batch_2.bin is 18433 bytes.*cut off"):
        Cifar10(tmp_path / "cifar")


def test_a_label_out_of_range_is_named_with_its_file(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar")
    path = tmp_path / "cifar" / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[3073] = 10
    path.write_bytes(content)
    source = Cifar10(tmp_path / "cifar")
    with pytest.raises(
        ShardwiseError, match=r"record 1 of .*data_batch_2.bin has label 10.*0 to 9"
    ):
        source.label(7)


def test_a_folder_of_png_images_gives_their_pixels(tmp_path: Path) -> None:
    pixels = write_images(tmp_path / "images", "png")
    source = ImageFolder(tmp_path / "images")
    assert source.classes == ("cat", "dog")
    assert_same(source, pixels, np.array([0, 0, 0, 1, 1, 1]))


def test_a_folder_of_jpeg_images_gives_nearly_their_pixels(tmp_path: Path) -> None:
    pixels = write_images(tmp_path / "images", "JPG")
    source = ImageFolder(tmp_path / "images")
    for index in range(len(source)):
        difference = source.read(index).astype(int) - pixels[index].astype(int)
        assert np.abs(difference).mean() < 8
    assert source.bytes_read > 0


def test_images_of_other_sizes_need_a_size(tmp_path: Path) -> None:
    write_images(tmp_path / "images", "png")
    odd = tmp_path / "images" / "dog" / "9.png"
    Image.new("L", (30, 20), 7).save(odd)
    source = ImageFolder(tmp_path / "images")
    with pytest.raises(ShardwiseError, match=r"9.png is 20x30 pixels and others are 12x10"):
        source.read(6)
    resized = ImageFolder(tmp_path / "images", size=(6, 8))
    assert resized.read(6).shape == (3, 6, 8)
    assert (resized.read(6) == 7).all()
    assert ImageFolder(tmp_path / "images", channels=1).shape == (1, 12, 10)


@pytest.mark.parametrize("damage", ["cut", "text", "flip", "deep"])
def test_a_bad_image_is_named(tmp_path: Path, damage: str) -> None:
    write_images(tmp_path / "images", "png")
    path = tmp_path / "images" / "cat" / "1.png"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "text":
        content = bytearray(b"no image")
    elif damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if damage == "deep":
        Image.fromarray(np.full((12, 10), 40000, dtype=np.uint16)).save(path)
    source = ImageFolder(tmp_path / "images")
    with pytest.raises(ShardwiseError, match=r"cat/1.png"):
        source.read(1)
    bad = bad_samples(source)
    assert list(bad) == [1] and "1.png" in bad[1]
    assert len(without(source, bad)) == 5


def test_samples_that_cannot_be_read_are_left_out_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pixels = write_images(tmp_path / "images", "png")
    (tmp_path / "images" / "cat" / "0.png").write_bytes(b"")
    source = open_source(tmp_path / "images", on_error="skip")
    assert_same(source, pixels[1:], np.array([0, 0, 1, 1, 1]))
    assert "cat/0.png" in caplog.text
    with pytest.raises(ShardwiseError, match="on_error='hope'"):
        open_source(tmp_path / "images", on_error="hope")


def test_npy_volumes_are_cut_out_of_the_file(tmp_path: Path) -> None:
    images, labels = write_npy(tmp_path / "npy")
    source = npy(tmp_path / "npy", num_classes=4)
    assert_same(source, images, labels)
    before = source.bytes_read
    source.read(0, Box((0, 0, 0, 0), (2, 3, 3, 3)))
    assert source.bytes_read - before == 2 * 3 * 3 * 3 * 4


def test_every_volume_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    images, labels = write_npy(tmp_path / "npy")
    for what, arrays in (("images", images), ("labels", labels)):
        (tmp_path / "many" / what).mkdir(parents=True)
        for number, array in enumerate(arrays):
            np.save(tmp_path / "many" / what / f"{number:03d}.npy", array)
    assert_same(open_source(tmp_path / "many", num_classes=4), images, labels)
    np.save(tmp_path / "many" / "images" / "002.npy", images[2][:, :-1])
    source = open_source(tmp_path / "many", num_classes=4)
    with pytest.raises(ShardwiseError, match=r"002.npy is 2x8x8x7 of float32, and the first"):
        source.read(2)
    (tmp_path / "many" / "images" / "003.npy").write_bytes(b"no")
    assert list(bad_samples(source)) == [2, 3]


def test_npy_labels_may_be_single_numbers(tmp_path: Path) -> None:
    images, labels = write_npy(tmp_path / "npy", (6, 1, 4, 4), volumes=False)
    source = npy(tmp_path / "npy")
    assert_same(source, images, labels)
    assert len(source.classes) == labels.max() + 1


def test_volumes_of_labels_need_the_number_of_classes_and_keep_to_it(tmp_path: Path) -> None:
    write_npy(tmp_path / "npy")
    with pytest.raises(ShardwiseError, match="num_classes"):
        npy(tmp_path / "npy")
    with pytest.raises(ShardwiseError, match=r"sample 0 of .* has label 3.*0 to 2"):
        npy(tmp_path / "npy", num_classes=3).label(0)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((3, 4)), np.zeros(3, int), "samples x channels x space"),
        (np.zeros((3, 1, 4)), np.zeros(2, int), "must be 3 or 3x4"),
        (np.zeros((3, 1, 4)), np.zeros(3), "labels .* not integers"),
        (np.zeros((3, 1, 4), complex), np.zeros(3, int), "images .* not numbers"),
        (np.zeros((3, 1, 4), object), np.zeros(3, int), "images .* not numbers"),
        (np.zeros((3, 1, 4)), np.full(3, -1), "label -1"),
    ],
)
def test_arrays_that_do_not_fit_say_why(images: np.ndarray, labels: np.ndarray, words: str) -> None:
    with pytest.raises(ShardwiseError, match=words):
        Arrays(images, labels, "here")


def test_no_pickle_is_loaded_from_npy(tmp_path: Path) -> None:
    write_npy(tmp_path / "npy")
    np.save(tmp_path / "npy" / "images.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    with pytest.raises(ShardwiseError, match=r"images.npy is no .npy file that can be read"):
        npy(tmp_path / "npy", num_classes=4)


def test_zarr_gives_its_arrays_and_counts_chunks(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    images, labels = write_npy(tmp_path / "npy")
    group = zarr.open_group(str(tmp_path / "volumes"), mode="w")
    group.create_array("images", data=images, chunks=(1, 2, 3, 4, 4))
    group.create_array("labels", data=labels, chunks=(1, 9, 8, 7))
    source = open_source(tmp_path / "volumes", num_classes=4)
    assert isinstance(source, Zarr)
    assert_same(source, images, labels)
    before = source.bytes_read
    source.read(0, Box((0, 0, 0, 0), (2, 4, 4, 4)))  # 2x1x1 chunks
    assert source.bytes_read - before == 2 * (2 * 3 * 4 * 4) * 4


def test_a_damaged_zarr_is_named(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    images, labels = write_npy(tmp_path / "npy", (2, 1, 8, 8), volumes=False)
    group = zarr.open_group(str(tmp_path / "volumes"), mode="w")
    group.create_array("images", data=images, chunks=(1, 1, 8, 8))
    with pytest.raises(ShardwiseError, match="volumes has no zarr array 'labels'"):
        Zarr(tmp_path / "volumes")
    group.create_array("labels", data=labels)
    chunk = next(path for path in (tmp_path / "volumes/images/c").rglob("*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:9])
    source = Zarr(tmp_path / "volumes")
    assert len(bad_samples(source)) == 1


def test_no_pickle_is_loaded_from_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    images, labels = write_npy(tmp_path / "npy", (2, 1, 8, 8), volumes=False)
    group = zarr.open_group(str(tmp_path / "volumes"), mode="w", zarr_format=2)
    group.create_array("images", data=images)
    group.create_array("labels", data=labels)
    path = tmp_path / "volumes" / "images" / ".zarray"
    path.write_text(path.read_text().replace('"filters": null', '"filters": [{"id": "pickle"}]'))
    with pytest.raises(ShardwiseError, match="pickle"):
        Zarr(tmp_path / "volumes")


def test_the_digits_are_divided_without_overlap() -> None:
    train, test, whole = digits("train"), digits("test"), digits("all")
    assert (len(train), len(test), len(whole)) == (1437, 360, 1797)
    counts = sum(np.bincount([s.label(i) for i in range(len(s))]) for s in (train, test))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert max(train.read(i).max() for i in range(len(train))) * train.scale == 1
    with pytest.raises(ShardwiseError, match="subset='half'"):
        digits("half")


@pytest.mark.parametrize("volumes", [False, True])
def test_synthetic_samples_are_the_same_every_time(volumes: bool) -> None:
    first, second = (Synthetic(5, (2, 9, 7), 3, volumes) for _ in range(2))
    images = np.stack([first.read(index) for index in range(5)])
    labels = np.stack([first.label(index) for index in range(5)])
    assert_same(second, images, labels)
    assert not np.array_equal(images[0], images[3])


def test_a_subset_is_renumbered_and_names_the_original() -> None:
    source = Synthetic(5, (1, 4, 4))
    subset = Subset(source, [4, 1])
    np.testing.assert_array_equal(subset.read(0), source.read(4))
    assert subset.label(1) == 1 and subset.where(0) == "sample 4 of synthetic"
    assert subset.bytes_read == source.bytes_read
    with pytest.raises(ShardwiseError, match="no sample of synthetic is left"):
        Subset(source, [])


def test_what_is_not_there_cannot_be_read() -> None:
    source = Synthetic(5, (1, 4, 4))
    with pytest.raises(ShardwiseError, match="5 samples, and no sample 5"):
        source.read(5)
    with pytest.raises(ShardwiseError, match=r"\[0:1, 2:5, 0:4\] is not inside sample 0"):
        source.read(0, Box((0, 2, 0), (1, 5, 4)))


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("nowhere", {}, "nowhere is neither"),
        ("synthetic:3x4", {}, "must be like synthetic:100x3x32x32"),
        ("synthetic:0x1x4x4", {}, "synthetic samples need"),
        ("digits", {"size": (3, 3)}, "size is no option of digits"),
        (".", {"num_classes": 3}, "num_classes is no option"),
    ],
)
def test_a_data_set_that_is_none_says_why(spec: str, options: dict, words: str) -> None:
    with pytest.raises(ShardwiseError, match=words):
        open_source(spec, **options)


def test_a_data_set_is_told_by_what_lies_in_its_folder(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar")
    write_images(tmp_path / "images", "png")
    write_npy(tmp_path / "npy")
    (tmp_path / "empty").mkdir()
    assert isinstance(open_source(tmp_path / "cifar", subset="test"), Cifar10)
    assert isinstance(open_source(tmp_path / "images", size=(4, 4)), ImageFolder)
    assert isinstance(open_source(tmp_path / "npy", num_classes=4), Arrays)
    assert isinstance(open_source("synthetic:7x1x4x4", num_classes=4), Synthetic)
    with pytest.raises(ShardwiseError, match="empty has no JPEG or PNG images"):
        open_source(tmp_path / "empty")
