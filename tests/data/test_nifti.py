"""NIfTI files: volumes as they were written, scaled, in part; what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest

from datafiles import assert_same
from shardwise.data import Nifti, open_source
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box


def save(path: Path, array: np.ndarray, affine: np.ndarray | None = None, **scaling: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine)
    if scaling:
        image.header.set_slope_inter(**scaling)
    nibabel.save(image, path)


def write_nifti(folder: Path, suffix: str = ".nii", num: int = 3, channels: int = 1) -> tuple:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((num, channels, 6, 5, 7)).astype(np.float32)
    labels = rng.integers(0, 4, (num, 6, 5, 7))
    for index in range(num):
        volume = np.moveaxis(images[index], 0, -1) if channels > 1 else images[index, 0]
        save(folder / f"images/case{index}{suffix}", volume)
        save(folder / f"labels/case{index}.nii", labels[index].astype(np.float32))
    return images, labels


@pytest.mark.parametrize(("suffix", "channels"), [(".nii", 1), (".nii.gz", 1), (".nii", 2)])
def test_volumes_and_masks_are_those_of_the_files(
    tmp_path: Path, suffix: str, channels: int
) -> None:
    images, labels = write_nifti(tmp_path, suffix, channels=channels)
    source = open_source(tmp_path, num_classes=4)
    assert isinstance(source, Nifti)
    assert_same(source, images, labels)
    before = source.bytes_read
    source.read(1, Box((0, 0, 0, 0), (channels, 3, 5, 7)))
    whole = (tmp_path / "images/case1.nii.gz").stat().st_size if suffix == ".nii.gz" else 0
    assert source.bytes_read - before == (whole or images[1].nbytes // 2)


def test_numbers_are_scaled_as_the_file_says_and_labels_may_be_single(tmp_path: Path) -> None:
    volume = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    for name in ("a", "b"):
        save(tmp_path / f"imagesTr/{name}.nii", volume * 1.0)
    save(tmp_path / "imagesTr/b.nii", volume)
    np.save(tmp_path / "labelsTr.npy", np.array([2, 0]))
    source = open_source(tmp_path)
    np.testing.assert_array_equal(source.read(0), source.read(1))
    assert [source.label(0), source.label(1), len(source.classes)] == [2, 0, 3]
    raw = nibabel.Nifti1Image(volume, np.eye(4))
    raw.header.set_data_dtype(np.int16)
    nibabel.save(
        nibabel.Nifti1Image((volume * 0.5 + 3).astype(np.float32), np.eye(4), raw.header),
        tmp_path / "imagesTr/b.nii",
    )
    scaled = np.asarray(nibabel.load(tmp_path / "imagesTr/b.nii").dataobj).astype(np.float32)
    np.testing.assert_array_equal(source.read(1)[0], scaled)
    box = Box((0, 1, 0, 1), (1, 2, 2, 4))
    np.testing.assert_array_equal(source.read(1, box)[0], scaled[1:2, 0:2, 1:4])


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_file_that_is_cut_off_or_none_is_named(tmp_path: Path, suffix: str) -> None:
    write_nifti(tmp_path, suffix)
    path = tmp_path / f"images/case1{suffix}"
    content = path.read_bytes()
    source = open_source(tmp_path, num_classes=4)
    for length in (0, 10, 200, len(content) // 2, len(content) - 40):
        path.write_bytes(content[:length])
        with pytest.raises(ShardwiseError, match=rf"case1{suffix} is .*(no NIfTI|cut off)"):
            source.read(1)
    path.write_bytes(b"x" * len(content))
    with pytest.raises(ShardwiseError, match=rf"case1{suffix} is no NIfTI file"):
        source.read(1)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write_nifti(tmp_path)
    source = open_source(tmp_path, num_classes=4)
    save(tmp_path / "images/case1.nii", np.zeros((6, 5, 8), np.float32))
    with pytest.raises(ShardwiseError, match=r"case1.nii is 1x6x5x8, .*should be 1x6x5x7"):
        source.read(1)
    save(tmp_path / "labels/case0.nii", np.full((6, 5, 7), 0.5, np.float32))
    with pytest.raises(ShardwiseError, match=r"labels/case0.nii has labels that are no whole"):
        source.label(0)
    save(tmp_path / "labels/case2.nii", np.zeros((6, 5, 7), np.int16), np.diag([1, 1, 3.0, 1]))
    with pytest.raises(ShardwiseError, match=r"labels/case2.nii has another affine than .*case2"):
        source.label(2)
    (tmp_path / "labels/case2.nii").unlink()
    with pytest.raises(ShardwiseError, match=r"images/case2.nii has no label case2.nii"):
        open_source(tmp_path, num_classes=4)
    with pytest.raises(ShardwiseError, match="say how many classes there are"):
        write_nifti(tmp_path / "again")
        open_source(tmp_path / "again")
