"""Tars: samples as they were put in, read where they lie; damage and pickles are named."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from datafiles import assert_same, npy_bytes, png_bytes, write_tar
from shardwise.data import Tars, open_source
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box


def write_images(folder: Path, counts: tuple[int, ...] = (3, 1, 2)) -> tuple[np.ndarray, list[int]]:
    """Tars of uneven length with images and classes; all pixels, and all classes."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (sum(counts), 3, 7, 5), dtype=np.uint8)
    labels, number = [index % 4 for index in range(len(pixels))], 0
    for tar, count in enumerate(counts):
        files: dict[str, bytes] = {"__about.txt": b"ours"}
        for index in range(number, number + count):
            files[f"a/{index:03d}.png"] = png_bytes(pixels[index])
            files[f"a/{index:03d}.cls"] = f"{labels[index]}\n".encode()
            files[f"a/{index:03d}.json"] = b"{}"
        number += count
        write_tar(folder / f"train-{tar:02d}.tar", files)
    return pixels, labels


def test_images_and_classes_come_from_all_shards_in_order(tmp_path: Path) -> None:
    pixels, labels = write_images(tmp_path / "shards")
    for spec in (tmp_path / "shards", str(tmp_path / "shards/train-{00..02}.tar")):
        source = open_source(spec)
        assert isinstance(source, Tars) and len(source.classes) == 4
        assert_same(source, pixels, np.array(labels))
    assert len(open_source(tmp_path / "shards/train-01.tar", num_classes=4)) == 1


def test_arrays_are_read_in_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    volumes = rng.standard_normal((3, 2, 6, 5, 4)).astype(np.float32)
    masks = rng.integers(0, 3, (3, 6, 5, 4)).astype(np.uint8)
    files = {}
    for index, (volume, mask) in enumerate(zip(volumes, masks, strict=True)):
        files |= {f"{index}.npy": npy_bytes(np.asfortranarray(volume) if index else volume)}
        files |= {f"{index}.seg.npy": npy_bytes(mask)}
    write_tar(tmp_path / "volumes.tar", files)
    source = open_source(tmp_path / "volumes.tar", num_classes=3)
    assert_same(source, volumes, masks)
    before = source.bytes_read
    source.read(1, Box((0, 0, 0, 0), (2, 3, 5, 4)))
    assert source.bytes_read - before == volumes[0].nbytes // 2
    with pytest.raises(ShardwiseError, match=r"volumes.tar are volumes: say how many classes"):
        open_source(tmp_path / "volumes.tar")


def test_a_tar_that_is_cut_off_anywhere_is_named_and_never_shorter(tmp_path: Path) -> None:
    write_images(tmp_path / "shards", (3,))
    path = tmp_path / "shards/train-00.tar"
    content = path.read_bytes()
    end = len(content.rstrip(b"\0"))
    for length in [0, 1, 511, 512, 700, 1024, 1536, *range(2048, end, 487), end]:
        path.write_bytes(content[:length])
        with pytest.raises(ShardwiseError, match=r"train-00.tar"):
            Tars(path)


def png() -> bytes:
    return png_bytes(np.zeros((3, 4, 4), np.uint8))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"1.png": png(), "1.pyd": b"x"}, "1.pyd of .*is a pickle"),
        ({"1.png": png(), "1.meta.pickle": b"x"}, "1.meta.pickle of .*is a pickle"),
        ({"1.png": png()}, "sample '1' of .*has no label; it needs one of .cls, .seg.npy"),
        ({"1.cls": b"1"}, "sample '1' of .*has no image"),
        ({"1.png": png(), "1.jpg": b"", "1.cls": b"1"}, "has .png and .jpg"),
        ({"1.png": png(), "1.cls": b"cat"}, "1.cls of .*must hold the number of a class"),
        ({"1.png": png(), "1.cls": b"-1"}, "1.cls of .*must hold the number of a class"),
        ({"1.png": png()[:-30], "1.cls": b"1"}, r"1.png is no image that can be read"),
        ({"1.npy": b"nothing", "1.cls": b"1"}, r"1.npy of .*is no .npy file that can be read"),
        (
            {"1.npy": npy_bytes(np.zeros((1, 4, 4)))[:-8], "1.cls": b"1"},
            "1.npy of .*is no .npy file .*shorter than it says",
        ),
        (
            {"1.npy": npy_bytes(np.array([[{}]])), "1.cls": b"1"},
            "1.npy of .*is object, and not numbers",
        ),
        ({"readme.txt": b"none"}, "has no samples"),
    ],
)
def test_what_is_wrong_in_a_tar_is_named(tmp_path: Path, files: dict, words: str) -> None:
    write_tar(tmp_path / "x.tar", files)
    with pytest.raises(ShardwiseError, match=words):
        open_source(tmp_path / "x.tar").read(0)


def test_images_of_other_sizes_are_named_or_resized(tmp_path: Path) -> None:
    other = png_bytes(np.zeros((3, 5, 4), np.uint8))
    write_tar(tmp_path / "x.tar", {"1.png": png(), "1.cls": b"0", "2.png": other, "2.cls": b"1"})
    with pytest.raises(ShardwiseError, match=r"2.png of .*is 3x5x4 of uint8, and the first is"):
        open_source(tmp_path / "x.tar").read(1)
    assert open_source(tmp_path / "x.tar", size=(3, 3)).read(1).shape == (3, 3, 3)


def test_a_compressed_tar_says_what_to_do(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"1.png": png(), "1.cls": b"0"})
    (tmp_path / "y.tar").write_bytes(gzip.compress((tmp_path / "x.tar").read_bytes()))
    with pytest.raises(ShardwiseError, match=r"y.tar is no tar .*must be unpacked"):
        open_source(tmp_path / "y.tar")
    with pytest.raises(ShardwiseError, match=r"there is no .*z-1.tar"):
        open_source(tmp_path / "z-{1..2}.tar")
