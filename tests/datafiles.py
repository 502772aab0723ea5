"""Small files of every kind of data, for tests."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from shardwise.data.cifar import CLASSES, RECORD_BYTES
from shardwise.data.source import Source
from shardwise.geometry.box import Box


def write_cifar(folder: Path, num: int = 6, files: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Files of CIFAR-10 with so many records each, and a test file; the training records."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    images = rng.integers(0, 256, (files * num, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, len(CLASSES), files * num)
    records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(-1, 3072)], axis=1)
    assert records.shape[1] == RECORD_BYTES
    for number in range(files):
        part = records[number * num : (number + 1) * num]
        (folder / f"data_batch_{number + 1}.bin").write_bytes(part.tobytes())
    (folder / "test_batch.bin").write_bytes(records[:2].tobytes())
    return images, labels


def write_images(folder: Path, suffix: str, size: tuple[int, int] = (12, 10)) -> np.ndarray:
    """Two classes of three images each; their pixels as saved, in the order of the names."""
    rng = np.random.default_rng(1)
    saved = []
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            coarse = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BILINEAR)
            image.save(folder / name / f"{number}.{suffix}", quality=95, subsampling=0)
            saved.append(np.asarray(image).transpose(2, 0, 1))
    return np.stack(saved)


def write_npy(
    folder: Path, shape: tuple[int, ...] = (5, 2, 9, 8, 7), volumes: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    folder.mkdir(parents=True)
    images = rng.standard_normal(shape).astype(np.float32)
    labels = rng.integers(0, 4, (shape[0], *shape[2:]) if volumes else shape[:1])
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    return images, labels


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))


def npy_bytes(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def png_bytes(pixels: np.ndarray) -> bytes:
    """Of channels x height x width."""
    file = BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "png")
    return file.getvalue()


def random_box(shape: tuple[int, ...], rng: np.random.Generator) -> Box:
    starts = [int(rng.integers(0, size)) for size in shape]
    stops = [int(rng.integers(low, size + 1)) for low, size in zip(starts, shape, strict=True)]
    return Box(tuple(starts), tuple(stops))


def assert_same(source: Source, images: np.ndarray, labels: np.ndarray, num_boxes: int = 4) -> None:
    """Every sample and label, whole and in random boxes, is the given one."""
    rng = np.random.default_rng(3)
    assert len(source) == len(images) == len(labels)
    for index in range(len(source)):
        np.testing.assert_array_equal(source.read(index), images[index])
        np.testing.assert_array_equal(source.label(index), labels[index])
        for _ in range(num_boxes):
            box = random_box(source.shape, rng)
            wanted = images[index][box.slices_in(Box.whole(source.shape))]
            np.testing.assert_array_equal(source.read(index, box), wanted)
            if source.label_shape:
                box = random_box(source.label_shape, rng)
                wanted = labels[index][box.slices_in(Box.whole(source.label_shape))]
                np.testing.assert_array_equal(source.label(index, box), wanted)
