"""Stores: what was packed comes out, in whole and in part, and whatever is damaged is named."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datafiles import assert_same, random_box, write_cifar, write_images, write_npy
from shardwise.cli.app import main
from shardwise.data import Arrays, Source, Store, Synthetic, bad_samples, digits, open_source, pack
from shardwise.data.store import Header
from shardwise.data.tiles import Tiling, tile_of
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import blocks


def contents(source: Source) -> tuple[np.ndarray, np.ndarray]:
    indices = range(len(source))
    return np.stack([source.read(i) for i in indices]), np.stack([source.label(i) for i in indices])


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("stripes", [1, 3, 32])
@pytest.mark.parametrize(
    "source",
    [
        Synthetic(10, (3, 40, 50)),
        Synthetic(4, (2, 30, 21, 17), 5, volumes=True),
        Synthetic(7, (1, 8, 8)),
        Synthetic(7, (1, 6000)),
    ],
    ids=["plane", "volume", "small", "line"],
)
def test_a_store_gives_what_was_packed(tmp_path: Path, source: Source, stripes: int) -> None:
    pack(source, tmp_path / "store", num_stripes=stripes)
    store = open_source(tmp_path / "store")
    assert isinstance(store, Store)
    store.check()
    assert_same(store, *contents(source), num_boxes=20)
    assert (store.classes, store.scale, store.dtype) == (
        source.classes,
        source.scale,
        source.dtype,
    )


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i2", "|u1", "<f8", "?"])
def test_numbers_of_any_kind_are_kept(tmp_path: Path, dtype: str) -> None:
    images = (np.random.default_rng(0).standard_normal((3, 2, 50, 60)) * 9).astype(dtype)
    labels = np.array([0, 300, 7])
    pack(Arrays(images, labels, "here"), tmp_path / "store")
    assert_same(Store(tmp_path / "store"), images, labels, num_boxes=20)


def test_every_kind_of_source_can_be_packed(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar")
    write_images(tmp_path / "images", "png")
    write_npy(tmp_path / "npy")
    sources = [
        open_source(tmp_path / "cifar"),
        open_source(tmp_path / "images"),
        open_source(tmp_path / "npy", num_classes=4),
        digits("test"),
    ]
    for number, source in enumerate(sources):
        pack(source, tmp_path / f"{number}")
        assert_same(Store(tmp_path / f"{number}"), *contents(source))
    pack(Store(tmp_path / "1"), tmp_path / "again")  # a store is a source as well
    assert_same(Store(tmp_path / "again"), *contents(sources[1]))


def test_samples_are_dealt_over_the_stripes(tmp_path: Path) -> None:
    pack(Synthetic(10, (1, 8, 8)), tmp_path / "store", num_stripes=4)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "store").glob("stripe-*.bin"))]
    assert sizes == [3 * 68, 3 * 68, 2 * 68, 2 * 68]


@pytest.mark.parametrize(("size", "halo"), [(160, 3), (224, 3), (256, 3), (512, 3), (1024, 8)])
def test_a_quarter_with_its_halo_costs_at_most_30_percent(
    tmp_path: Path, size: int, halo: int
) -> None:
    source = Synthetic(1, (3, size, size))
    pack(source, tmp_path / "store")
    store = Store(tmp_path / "store")
    for rows in blocks(size, 2).tolist():
        for columns in blocks(size, 2).tolist():
            starts = (0, max(0, rows[0] - halo), max(0, columns[0] - halo))
            stops = (3, min(size, rows[1] + halo), min(size, columns[1] + halo))
            before = store.bytes_read
            store.read(0, Box(starts, stops))
            assert store.bytes_read - before <= 0.30 * source.read(0).nbytes


def test_tiles_are_small_where_samples_are_large() -> None:
    assert tile_of((1, 8, 8), 1) == (1, 8, 8)
    assert tile_of((3, 224, 224), 1) == (3, 7, 7)
    assert tile_of((1, 512, 512, 512), 4) == (1, 16, 16, 16)
    tiling = Tiling((3, 224, 224), (3, 7, 7), np.dtype(np.uint8))
    assert (tiling.grid, tiling.num_tiles) == ((1, 32, 32), 1024)
    assert tiling.num_bytes == 3 * 224 * 224 + 4 * 1025


@pytest.mark.parametrize("shape", [(3, 70, 50), (1, 20, 18, 16), (1, 9000), (1, 8, 8)])
def test_what_is_announced_is_what_is_read(shape: tuple[int, ...]) -> None:
    tiling = Tiling(shape, tile_of(shape, 1), np.dtype(np.uint8))
    rng = np.random.default_rng(0)
    packed = np.frombuffer(tiling.pack(rng.integers(0, 256, shape, dtype=np.uint8), 0), np.uint8)
    for _ in range(30):
        box = random_box(shape, rng)
        wanted, read = tiling.read(packed, box, 0)
        num_announced = 0
        alone = np.zeros_like(packed)
        alone[tiling.data_bytes :] = packed[tiling.data_bytes :]
        for first, last in tiling.runs(box):
            alone[first:last] = packed[first:last]
            num_announced += last - first
        np.testing.assert_array_equal(tiling.read(alone, box, 0)[0], wanted)
        assert num_announced <= read  # which has checksums in it


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    pack(Synthetic(6, (1, 96, 96), 4), tmp_path / "store", num_stripes=2)
    return tmp_path / "store"


def test_a_damaged_tile_is_named_and_the_others_are_read(store: Path) -> None:
    flip(store / "stripe-00001.bin", 40)
    opened = Store(store)
    with pytest.raises(ShardwiseError, match=r"sample 1 \(record 0 of .*stripe-00001.bin\).*damag"):
        opened.read(1)
    with pytest.raises(ShardwiseError, match="checksum"):
        opened.read(1, Box((0, 0, 0), (1, 4, 4)))
    assert opened.read(1, Box((0, 48, 48), (1, 96, 96))).shape == (1, 48, 48)
    assert list(bad_samples(opened)) == [1]
    with pytest.raises(ShardwiseError, match=r"stripe-00001.bin is damaged"):
        opened.check()


def test_a_stripe_that_is_cut_off_or_missing_is_named_or_skipped(store: Path) -> None:
    path = store / "stripe-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardwiseError, match=r"stripe-00001.bin is \d+ bytes and was \d+"):
        Store(store)
    assert len(open_source(store, on_error="skip")) == 3
    path.unlink()
    with pytest.raises(ShardwiseError, match=r"stripe-00001.bin cannot be read: No such file"):
        Store(store)
    assert len(open_source(store, on_error="skip")) == 3


def test_records_and_stripes_in_each_others_place_are_found_out(
    store: Path, tmp_path: Path
) -> None:
    first, second = store / "stripe-00000.bin", store / "stripe-00001.bin"
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert len(bad_samples(Store(store))) == 6
    first.write_bytes(contents[0])
    size = len(contents[0]) // 3
    second.write_bytes(contents[1][size:] + contents[1][:size])
    assert list(bad_samples(Store(store))) == [1, 3, 5]
    pack(Synthetic(6, (1, 96, 96), 4, seed=1), tmp_path / "other", num_stripes=2)
    second.write_bytes((tmp_path / "other" / "stripe-00001.bin").read_bytes())
    assert list(bad_samples(Store(store))) == [1, 3, 5]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"scale"', '"skale"', "checksum"),
        ('"|u1"', '"|i1"', "checksum"),
        ('"version": 1', '"version": 2', "checksum"),
        ('"shardwise store"', '"zip"', "not the header of a store"),
        ("{", "[", "no JSON"),
    ],
)
def test_a_changed_header_is_refused(store: Path, old: str, new: str, words: str) -> None:
    path = store / "store.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ShardwiseError, match=rf"store.json.*{words}"):
        Store(store)


def test_a_store_of_another_version_says_so(store: Path) -> None:
    header = Header.load(store / "store.json").model_copy(update={"version": 2})
    (store / "store.json").write_text(header.to_json())
    with pytest.raises(ShardwiseError, match="version 2, and this shardwise reads version 1"):
        Store(store)


def test_a_damaged_store_can_be_packed_anew_without_what_is_lost(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (store / "stripe-00001.bin").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["pack", str(store), str(tmp_path / "new"), "--on-error", "skip"])
    assert ended.value.code == 0 and "3 left out" in capfd.readouterr().out
    assert len(Store(tmp_path / "new")) == 3


def test_damaged_labels_are_named(store: Path) -> None:
    flip(store / "labels.bin", 3)
    with pytest.raises(ShardwiseError, match=r"labels.bin is damaged"):
        Store(store)


# -- packing ---------------------------------------------------------------------------------------


class Faulty(Synthetic):
    """Sample 2 cannot be read, and sample 3 has no proper label."""

    def _read(self, index: int, box: Box) -> np.ndarray:
        if index == 2:
            raise OSError(errno.EIO, "Input/output error")
        return super()._read(index, box)

    def _read_label(self, index: int, box: Box) -> Any:
        return 99 if index == 3 else super()._read_label(index, box)


def test_a_sample_that_cannot_be_read_ends_the_packing_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match="sample 2 of synthetic cannot be read: Input/output"):
        pack(Faulty(5, (1, 4, 4)), tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_samples_that_cannot_be_read_are_left_out_if_asked(tmp_path: Path) -> None:
    source = Faulty(5, (1, 4, 4))
    left_out = pack(source, tmp_path / "store", on_error="skip")
    assert list(left_out) == [2, 3] and "label 99" in left_out[3]
    store = Store(tmp_path / "store")
    assert [store.label(index) for index in range(len(store))] == [0, 1, 4]
    np.testing.assert_array_equal(store.read(2), source.read(4))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ShardwiseError, match=r"store cannot be written: No space left on device"):
        pack(Synthetic(5, (1, 4, 4)), tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_never_overwritten(store: Path) -> None:
    with pytest.raises(ShardwiseError, match="exists already"):
        pack(Synthetic(5, (1, 4, 4)), store)


KILLED = """
import os, signal, sys
from shardwise.data import Synthetic, pack
left = int(sys.argv[2])
def done():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
pack(Synthetic(20, (1, 32, 32)), sys.argv[1], sample_done=done)
"""


def test_a_killed_packing_leaves_no_store_under_the_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), "11"]
    assert subprocess.run(command, check=False).returncode == -9
    assert not (tmp_path / "store").exists()
    pack(Synthetic(20, (1, 32, 32)), tmp_path / "store")
    assert len(Store(tmp_path / "store")) == 20


def test_the_command_packs_and_is_quiet_without_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "images", "png")
    (tmp_path / "images" / "dog" / "2.png").write_bytes(b"")
    arguments = ["pack", str(tmp_path / "images"), str(tmp_path / "store"), "--size", "6x8"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capfd.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.count("\n") == 1 and "dog/2.png is no image" in err
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--on-error", "skip", "--stripes", "2"])
    out, err = capfd.readouterr()
    assert ended.value.code == 0
    assert out == f"5 samples in {tmp_path / 'store'}, 1 left out\n"
    assert err.count("\n") == 1 and err.startswith("left out: ")
    assert Store(tmp_path / "store").shape == (3, 6, 8)
