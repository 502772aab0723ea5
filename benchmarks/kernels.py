"""Gflop/s of every kernel on the layers of P1's and P5's networks, against stock PyTorch and SGEMM.

    python benchmarks/kernels.py [--networks vgg16,...] [--batch 8] [--threads 1] [--every 1]
        [--cpu-time] [--json FILE]

For each different layer and direction: the stock operator and each kernel, the better of NCHW and
channels last, and SGEMM of the same size (torch.mm, at most 2^26 elements of its widest matrix);
all in turns in one run. Rates count a plain sum of products for every kernel. Then the goals:
CONVGEMM against SGEMM, CONVGEMM_TRANS and Winograd against the stock operator. On a machine that
others use too, --cpu-time counts the time of the one thread instead of the clock's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from shardwise import zoo
from shardwise.accelerate import convolutions
from shardwise.kernels import tuner
from shardwise.kernels.run import STOCK
from shardwise.kernels.shape import ConvShape
from shardwise.kernels.tuner import Tuner, call, interleaved, random_tensors, settings

NETWORKS = ("vgg16", "resnet34", "densenet121", "googlenet")
LAYOUTS = {"nchw": False, "last": True}
LARGEST = 1 << 26


def sgemm(shape: ConvShape, direction: str) -> tuple[Callable[[], object], float]:
    """A product of matrices of the same sizes, and the share of the layer's work that it does."""
    (n, f, p, q), depth = shape.out, math.prod(shape.w[1:])
    pixels = n * p * q
    cut = min(pixels, LARGEST // max(depth, f))
    rows, inner, columns = {
        "fwd": (f, depth, cut),
        "dx": (depth, f, cut),
        "dw": (f, cut, depth),
    }[direction]
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    out = torch.empty(rows, columns)
    return (lambda: torch.mm(a, b, out=out)), cut / pixels


def measure(shape: ConvShape, direction: str) -> dict[str, float]:
    """Gflop/s by kernel and layout."""
    calls: dict[str, Callable[[], object]] = {}
    for layout, last in LAYOUTS.items():
        laid = replace(shape, last=last, filter_last=last)
        tensors = random_tensors(laid)
        for name in Tuner(memory_bytes=4 << 30).candidates(laid, direction):
            calls[f"{name} {layout}"] = call(direction, name, settings(laid), *tensors)
    calls["sgemm"], share = sgemm(shape, direction)
    work = shape.flops / 1e9
    taken = interleaved(calls)
    return {
        name: work * (share if name == "sgemm" else 1) / seconds for name, seconds in taken.items()
    }


def better(rates: dict[str, float], kernel: str) -> float | None:
    """Of the two layouts."""
    found = [rates[key] for layout in LAYOUTS if (key := f"{kernel} {layout}") in rates]
    return max(found) if found else None


def layers(network: str, batch: int) -> dict[ConvShape, tuple[str, bool]]:
    """The different convolutions of a network: the first layer's name, and whether dx is needed."""
    found: dict[ConvShape, tuple[str, bool]] = {}
    for seen in convolutions(zoo.build(network), torch.randn(zoo.input_shape(network, batch))):
        found.setdefault(seen.shape, (seen.name, not seen.first))
    return found


def line(row: dict) -> str:
    rates = row["gflops"]
    names = dict.fromkeys(key.split()[0] for key in rates if key != "sgemm")
    shown = [f"sgemm {rates['sgemm']:.0f}"]
    shown += [f"{name} {better(rates, name):.1f}" for name in names]
    return f"{row['network']:12} {row['sizes']:34} {row['direction']:3}  " + "  ".join(shown)


def ratios(
    rows: list[dict], direction: str, over: tuple[str, ...], under: str, test
) -> list[float]:  # type: ignore[no-untyped-def]
    found = []
    for row in rows:
        if row["direction"] == direction and test(row):
            tops = [better(row["gflops"], name) for name in over]
            base = row["gflops"].get(under) or better(row["gflops"], under)
            best = max((top for top in tops if top), default=None)
            if best and base:
                found.append(best / base)
    return found


def summary(rows: list[dict]) -> list[str]:
    def wide(row: dict) -> bool:
        return min(row["w"][:2]) >= 64

    def winograd(row: dict) -> bool:
        return wide(row) and row["w"][2:] == [3, 3] and "winograd4 nchw" in row["gflops"]

    lines = []
    for title, found in (
        ("CONVGEMM / SGEMM, >= 64 channels", ratios(rows, "fwd", ("convgemm",), "sgemm", wide)),
        (
            "CONVGEMM_TRANS / stock dw, all layers",
            ratios(rows, "dw", ("convgemm_trans",), STOCK, lambda row: True),
        ),
        (
            "Winograd / stock fwd, 3x3, >= 64 channels",
            ratios(rows, "fwd", ("winograd2", "winograd4"), STOCK, winograd),
        ),
    ):
        if found:
            mean = math.exp(statistics.fmean(map(math.log, found)))
            lines.append(
                f"{title}: {mean:.2f} in geometric mean, {min(found):.2f} to {max(found):.2f}, "
                f"{len(found)} layers"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th layer")
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads > 1:
        parser.error("--cpu-time is for one thread: threads that wait also take time")
    if arguments.cpu_time:
        tuner.clock = time.process_time
    torch.set_num_threads(arguments.threads)
    path: Path | None = arguments.json
    rows = json.loads(path.read_text()) if path and path.exists() else []
    for network in arguments.networks.split(","):
        found = list(layers(network, arguments.batch).items())
        for shape, (name, inner) in found[:: arguments.every]:
            for direction in ("fwd", "dx", "dw") if inner else ("fwd", "dw"):
                sizes = "x".join(map(str, shape.x)) + " * " + "x".join(map(str, shape.w))
                row = {
                    "network": network,
                    "layer": name,
                    "sizes": sizes + (f" /{shape.stride[0]}" if shape.stride != (1, 1) else ""),
                    "direction": direction,
                    "w": list(shape.w),
                    "threads": arguments.threads,
                    "gflops": measure(shape, direction),
                }
                rows.append(row)
                print(line(row), flush=True)
                if path:
                    path.write_text(json.dumps(rows, indent=1))
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
