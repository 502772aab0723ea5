"""The loader against what training consumes, and the bytes that a rank of a split reads.

    python benchmarks/loader.py [--seconds 10] [--json loader.json]

Prints samples per second of a training step (forward, backward, SGD, on data in memory), of the
loader alone (from a packed store, with flips, crops and normalising), and their ratio, for the
digits network and for ResNet-34 on samples of CIFAR-10's size; the aim is a ratio of at least 3.
Also what is left of the training's speed when it is fed by the loader on the same cores.

Then the share of a sample that each rank reads when height and width are split 2x2 with a halo, as
counted by the loader (checksums included) and, where the system tells, as read from disk in whole
pages; the aim is at most 30 %. Samples are synthetic but for the digits: speed does not depend on
the picture.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from torch import nn

from results import save
from shardwise import zoo
from shardwise.data import Augment, Batch, Loader, Source, Store, Synthetic, digits, pack
from shardwise.geometry.box import Box
from shardwise.geometry.layout import blocks

ROUNDS = 5
Row = dict[str, float | str]


def samples_per_second(steps: dict[str, Callable[[], int]], seconds: float) -> dict[str, float]:
    """The median of interleaved rounds, so that a slow moment of the machine hits all alike."""
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 1):
        for name, step in steps.items():
            num, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < seconds / ROUNDS:
                num += step()
            rates[name].append(num / elapsed)
    return {name: statistics.median(each[1:]) for name, each in rates.items()}  # one to warm up


def training_step(name: str) -> Callable[[Batch], int]:
    torch.manual_seed(0)
    model = zoo.build(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(batch: Batch) -> int:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        return batch.size

    return step


def throughput(name: str, source: Source, augment: Augment, batch: int, seconds: float) -> Row:
    loader = Loader(source, batch, augment=augment)
    step, first = training_step(name), next(iter(loader))
    endless = (part for _ in count() for part in loader)
    steps = {
        "training": lambda: step(first),
        "loader": lambda: sum(part.size for part in Loader(source, batch, augment=augment)),
        "both": lambda: step(next(endless)),
    }
    rates = samples_per_second(steps, seconds)
    return {
        "network": name,
        "training samples/s": rates["training"],
        "loader samples/s": rates["loader"],
        "ratio": rates["loader"] / rates["training"],
        "fed by the loader": rates["both"] / rates["training"],
    }


def quarter(shape: tuple[int, ...], row: int, column: int, halo: int) -> Box:
    """A rank's part of a sample split 2x2, with its halo."""
    starts, stops = [0], [shape[0]]
    for size, place in zip(shape[1:], (row, column), strict=True):
        start, stop = blocks(size, 2)[place].tolist()
        starts.append(max(0, start - halo))
        stops.append(min(size, stop + halo))
    return Box(tuple(starts), tuple(stops))


def cold_epoch(folder: Path, row: int, column: int, halo: int) -> tuple[float, float, float]:
    """Bytes that a rank reads per byte of samples, as counted and from the disk; samples/s."""
    drop_from_memory(folder)
    store = Store(folder)
    inner = quarter(store.shape, row, column, halo)
    before, start = disk_bytes(), time.perf_counter()
    for _ in Loader(store, 4, box=lambda n: Box((0, *inner.starts), (n, *inner.stops))):
        pass
    whole = Box.whole(store.shape).numel * store.dtype.itemsize * len(store)
    seconds = time.perf_counter() - start
    return store.bytes_read / whole, (disk_bytes() - before) / whole, len(store) / seconds


def disk_bytes() -> int:
    """What this process has had read from disks; 0 where the system does not tell."""
    path = Path("/proc/self/io")
    if not path.exists():
        return 0
    return int(path.read_text().split("read_bytes: ")[1].split()[0])


def drop_from_memory(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def packed(source: Source, folder: Path) -> Store:
    pack(source, folder)
    return Store(folder)


def measure(folder: Path, seconds: float) -> list[Row]:
    crops = Augment(flip=(False, True), padding=4, mean=(0.5,) * 3, std=(0.25,) * 3)
    shifts = Augment(padding=1, mean=(0.3,), std=(0.4,))
    small = packed(digits(), folder / "digits")
    cifar = packed(Synthetic(2000, (3, 32, 32)), folder / "cifar")
    rows = [
        throughput("digits", small, shifts, 64, seconds),
        throughput("resnet34_cifar", cifar, crops, 16, seconds),
    ]
    for size, halo in ((224, 3), (512, 3), (1024, 3)):
        large = folder / f"large-{size}"
        pack(Synthetic(8, (3, size, size)), large)
        epochs = [cold_epoch(large, row, column, halo) for row in (0, 1) for column in (0, 1)]
        counted, from_disk, rates = zip(*epochs, strict=True)
        sample = {"sample": f"3x{size}x{size}", "halo": str(halo)}
        rows.append(
            sample
            | {"a rank reads": max(counted), "from disk": max(from_disk)}
            | {"cold samples/s": min(rates)}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.seconds)
    for row in rows:
        print(
            "  ".join(
                f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
