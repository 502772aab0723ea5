"""Mutated files: an error that names the file, or the right data; no other error, no hang.

Stores and PNG files have checksums, so wrong data is never accepted from them. CIFAR-10, `.npy`,
JPEG and zarr have none (of their own): there, what comes must at least be what the source promises.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from datafiles import write_cifar, write_images, write_npy
from mutations import mutate
from shardwise.data import Source, Synthetic, open_source, pack
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box

ROUNDS = 40  # for each kind of store, and for each other kind of file


def readings(source: Source) -> list[list[np.ndarray] | None]:
    """Every sample and label, whole and in part; None where one cannot be read."""
    quarter = Box((0, *(size // 2 for size in source.shape[1:])), source.shape)
    found: list[list[np.ndarray] | None] = []
    for index in range(len(source)):
        try:
            label = np.asarray(source.label(index))
            found.append([source.read(index), source.read(index, quarter), label])
        except ShardwiseError as error:
            assert "\n" not in str(error)
            found.append(None)
    return found


def fuzz(folder: Path, copy: Path, strict: bool, seed: int, **options: object) -> dict[str, int]:
    """Mutates copies of a data set; counts those refused, those read in part and in full."""
    right = readings(open_source(folder, **options))  # type: ignore[arg-type]
    counts = {"refused": 0, "in part": 0, "in full": 0}
    for round_ in range(ROUNDS):
        rng = np.random.default_rng((seed, round_))
        shutil.copytree(folder, copy)
        done = mutate(copy, rng)
        try:
            source = open_source(copy, **options)  # type: ignore[arg-type]
        except ShardwiseError as error:
            assert str(copy) in str(error) and "\n" not in str(error), done
            counts["refused"] += 1
        else:
            read = readings(source)
            counts["in part" if None in read else "in full"] += 1
            for index, sample in enumerate(read):
                if sample is None:
                    continue
                assert sample[0].shape == source.shape and sample[0].dtype == source.dtype, done
                assert sample[2].min() >= 0 and sample[2].max() < len(source.classes), done
                wanted = right[index] if strict else sample
                assert wanted is not None
                for one, other in zip(sample, wanted, strict=True):
                    np.testing.assert_array_equal(one, other, done)
        shutil.rmtree(copy)
    assert sum(counts.values()) == ROUNDS
    return counts


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["tiles", "small", "volumes"])
def test_a_mutated_store_gives_the_right_data_or_none(tmp_path: Path, kind: str, seed: int) -> None:
    source = {
        "tiles": Synthetic(5, (1, 70, 70)),
        "small": Synthetic(9, (1, 5, 5)),
        "volumes": Synthetic(4, (1, 20, 18, 16), 3, volumes=True),
    }[kind]
    pack(source, tmp_path / "right", num_stripes=3)
    counts = fuzz(tmp_path / "right", tmp_path / "mutated", strict=True, seed=seed)
    assert counts["refused"] > 5 and counts["in part"] > 5


@pytest.mark.timeout(120)
def test_a_mutated_png_gives_the_right_pixels_or_none(tmp_path: Path) -> None:
    write_images(tmp_path / "right", "png")
    # A file that is gone is another data set, and not a wrong one: labels and numbers move.
    keep = pytest.MonkeyPatch()
    keep.setattr(Path, "unlink", lambda path: path.write_bytes(b""))
    try:
        counts = fuzz(tmp_path / "right", tmp_path / "mutated", strict=True, seed=7)
    finally:
        keep.undo()
    assert counts["in part"] > 20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["jpeg", "cifar", "npy", "npy labels", "zarr"])
def test_other_mutated_files_give_what_was_promised_or_none(tmp_path: Path, kind: str) -> None:
    options: dict[str, object] = {}
    folder = tmp_path / "right"
    if kind == "jpeg":
        write_images(folder, "jpg")
    elif kind == "cifar":
        write_cifar(folder)
    elif kind == "npy labels":
        write_npy(folder, (6, 1, 4, 4), volumes=False)
    elif kind == "npy":
        write_npy(folder, (3, 1, 4, 4, 4))
        options = {"num_classes": 4}
    else:
        zarr = pytest.importorskip("zarr")
        images, labels = write_npy(tmp_path / "npy", (3, 1, 8, 8), volumes=False)
        group = zarr.open_group(str(folder), mode="w")
        group.create_array("images", data=images, chunks=(1, 1, 4, 8))
        group.create_array("labels", data=labels)
    fuzz(folder, tmp_path / "mutated", strict=False, seed=11, **options)
