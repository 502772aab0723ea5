"""The loader against what training consumes, and the bytes that a rank of a split reads.

    python benchmarks/loader.py [--seconds 5] [--json loader.json]

Prints samples per second of a training step (forward, backward, SGD, on data in memory), of the
loader alone (from a packed store, with flips, crops and normalising), and their ratio, for the
digits network and for ResNet-34 on samples of CIFAR-10's size; the aim is a ratio of at least 3.
Then the share of a sample that each rank reads when height and width are split 2x2 with a halo; the
aim is at most 30 %. Samples are synthetic but for the digits: speed does not depend on the picture.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from shardwise import zoo
from shardwise.box import Box
from shardwise.data import Augment, Batch, Loader, Source, Store, Synthetic, digits, pack
from shardwise.layout import blocks

Row = dict[str, float | str]


def samples_per_second(step: Callable[[], int], seconds: float) -> float:
    step()  # warm-up
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += step()
    return count / elapsed


def training_step(name: str, batch: Batch) -> Callable[[], int]:
    torch.manual_seed(0)
    model = zoo.build(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> int:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        return batch.size

    return step


def throughput(name: str, source: Source, augment: Augment, batch: int, seconds: float) -> Row:
    loader = Loader(source, batch, augment=augment)
    first = next(iter(loader))
    trained = samples_per_second(training_step(name, first), seconds)
    loaded = samples_per_second(lambda: sum(part.size for part in loader), seconds)
    return {
        "network": name,
        "training samples/s": trained,
        "loader samples/s": loaded,
        "ratio": loaded / trained,
    }


def quarter(shape: tuple[int, ...], row: int, column: int, halo: int) -> Box:
    """A rank's part of a sample split 2x2, with its halo."""
    starts, stops = [0], [shape[0]]
    for size, place in zip(shape[1:], (row, column), strict=True):
        start, stop = blocks(size, 2)[place].tolist()
        starts.append(max(0, start - halo))
        stops.append(min(size, stop + halo))
    return Box(tuple(starts), tuple(stops))


def share_read(source: Source, row: int, column: int, halo: int) -> float:
    """Bytes that a rank reads of an epoch, checksums and labels included, per byte of samples."""
    inner = quarter(source.shape, row, column, halo)
    before = source.bytes_read
    for _ in Loader(source, 4, box=lambda n: Box((0, *inner.starts), (n, *inner.stops))):
        pass
    whole = Box.whole(source.shape).numel * source.dtype.itemsize * len(source)
    return (source.bytes_read - before) / whole


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
        throughput("resnet34_cifar", cifar, crops, 64, seconds),
    ]
    for size, halo in ((224, 3), (512, 3), (1024, 3)):
        large = packed(Synthetic(8, (3, size, size)), folder / f"large-{size}")
        shares = [share_read(large, row, column, halo) for row in (0, 1) for column in (0, 1)]
        row: Row = {"sample": f"3x{size}x{size}", "halo": str(halo)}
        row |= {f"rank {rank} reads": share for rank, share in enumerate(shares)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each measurement")
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
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
