"""Gflop/s of every kernel on the layers of P1's and P5's networks, against stock PyTorch and SGEMM.

    python benchmarks/kernels.py [--networks vgg16,...] [--3d] [--directions fwd,dx,dw] [--batch 8]
        [--threads 1] [--every 1] [--cpu-time] [--json FILE]

For each different layer of VGG-16 (those of P5's Table 2), ResNet-34, DenseNet-121 and GoogLeNet,
at ImageNet size, and each direction: the stock operator and each kernel, the better of NCHW and
channels last, and SGEMM of the same size (torch.mm, at most 2^26 elements of its widest matrix);
all in turns in one run. Rates count a plain sum of products for every kernel. The batch is 8, or
what keeps a layer under LARGEST_WORK. Then the goals: CONVGEMM against SGEMM, CONVGEMM_TRANS and
Winograd against the stock operator. On a machine that others use too, --cpu-time counts the time of
the one thread instead of the clock's.

--3d: instead, the layers of a 3-D U-Net, of 16 channels at 64^3 voxels to 256 at 8^3, one volume or
--batch of them: PyTorch computes small ones by another, slower way where there is only one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from results import Results, goal
from shardwise import zoo
from shardwise.kernels import tuner
from shardwise.kernels.accelerate import convolutions
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import KERNELS, STOCK
from shardwise.kernels.tuner import Tuner, call, interleaved, random_tensors, settings

NETWORKS = ("vgg16", "resnet34", "densenet121", "googlenet")
VOLUMES = "unet3d"
LAYOUTS = {"nchw": False, "last": True}
LARGEST = 1 << 26
LARGEST_WORK = 16e9  # operations of a layer and direction: enough to see its rate
SECONDS = 0.8  # that a row takes for each 1e9 operations, all kernels together, on one thread


def sgemm(shape: ConvShape, direction: str) -> tuple[Callable[[], object], float]:
    """A product of matrices of the same sizes, and the share of the layer's work that it does."""
    (n, f, *sizes), depth = shape.out, math.prod(shape.w[1:])
    pixels = n * math.prod(sizes)
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
    if kernel in rates:
        return rates[kernel]
    found = [rates[key] for layout in LAYOUTS if (key := f"{kernel} {layout}") in rates]
    return max(found) if found else None


def layers(network: str, batch: int) -> dict[ConvShape, tuple[str, bool]]:
    """The different convolutions of a network: the first layer's name, and whether dx is needed."""
    found: dict[ConvShape, tuple[str, bool]] = {}
    model = zoo.build(network).eval()  # one sample has no batch statistics
    for seen in convolutions(model, torch.randn(zoo.input_shape(network, 1))):
        samples = max(1, min(batch, int(LARGEST_WORK / seen.shape.flops)))
        shape = replace(seen.shape, x=(samples, *seen.shape.x[1:]))
        found.setdefault(shape, (seen.name, not seen.first))
    return found


# Channels in and out, and voxels along each side: two convolutions at each level going down, and
# the first of each level going up, after what was concatenated.
UNET_LAYERS = (
    *((16, 16, 64), (16, 32, 32), (32, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8)),
    *((128, 128, 8), (128, 256, 8), (256, 256, 8), (128, 64, 16), (64, 32, 32), (48, 16, 64)),
)


def volumes(batch: int) -> dict[ConvShape, tuple[str, bool]]:
    """The 3x3x3 convolutions of a 3-D U-Net."""
    ones = (1, 1, 1)
    return {
        ConvShape((batch, c, *[side] * 3), (f, c, 3, 3, 3), padding=ones): (f"{c} to {f}", True)
        for c, f, side in UNET_LAYERS
    }


def line(row: dict) -> str:
    rates = row["gflops"]
    names = dict.fromkeys(key.split()[0] for key in rates if key != "sgemm")
    shown = [f"sgemm {rates['sgemm']:.0f}"]
    shown += [f"{name} {better(rates, name):.1f}" for name in names]
    return f"{row['network']:12} {row['sizes']:34} {row['direction']:3}  " + "  ".join(shown)


def ratios(
    rows: list[dict],
    direction: str,
    over: tuple[str, ...],
    under: str,
    counts: Callable[[dict], bool],
) -> list[float]:
    found = []
    for row in rows:
        if row["direction"] == direction and counts(row):
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

    near = ratios(rows, "fwd", ("convgemm",), "sgemm", wide)
    trans = ratios(rows, "dw", ("convgemm_trans",), STOCK, lambda row: True)
    bound = ratios(rows, "dw", ("sgemm",), STOCK, lambda row: True)
    fast = ratios(rows, "fwd", ("winograd2", "winograd4"), STOCK, winograd)
    return [
        goal("CONVGEMM / SGEMM, >= 64 channels", near, 0.9, "layers"),
        goal("CONVGEMM_TRANS / stock dw, all layers", trans, 1.3, "layers"),
        goal("SGEMM / stock dw, all layers (what a GEMM could reach)", bound, 1.3, "layers"),
        goal("Winograd / stock fwd, 3x3, >= 64 channels", fast, 1.6, "layers"),
    ]


def summary_3d(rows: list[dict]) -> list[str]:
    """Nothing where no volumes were measured."""

    def wide(row: dict) -> bool:
        return min(row["w"][:2]) >= 32

    def every(_row: dict) -> bool:
        return True

    titles = {"fwd": "forward", "dx": "input gradient", "dw": "weight gradient"}
    best = {d: tuple(KERNELS[d]) for d in titles}
    lines = [
        goal(f"3-D: best of ours / stock, {title}", found, 3.0 if d == "dw" else 1.0, "layers")
        for d, title in titles.items()
        if (found := ratios(rows, d, best[d], STOCK, every))
    ]
    bound = ratios(rows, "dw", ("sgemm",), STOCK, every)
    near = ratios(rows, "fwd", ("convgemm",), "sgemm", wide)
    if bound:
        lines.append(goal("3-D: SGEMM / stock, weight gradient", bound, 3.0, "layers"))
    if near:
        lines.append(goal("3-D: CONVGEMM / SGEMM, >= 32 channels", near, 0.9, "layers"))
    return lines


def rows_to_measure(given: argparse.Namespace) -> list[tuple[str, str, ConvShape, str]]:
    def found(network: str) -> dict[ConvShape, tuple[str, bool]]:
        if network == VOLUMES:
            return volumes(given.batch or 1)
        return layers(network, given.batch or 8)

    return [
        (network, name, shape, direction)
        for network in given.networks.split(",")
        for shape, (name, inner) in list(found(network).items())[:: given.every]
        for direction in given.directions.split(",")
        if inner or direction != "dx"
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument(
        "--3d", dest="networks", action="store_const", const=VOLUMES, help="those of a 3-D U-Net"
    )
    parser.add_argument("--directions", default="fwd,dx,dw")
    parser.add_argument("--batch", type=int, help="8, or one volume, unless given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th layer")
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    given = parser.parse_args()
    if given.cpu_time and given.threads > 1:
        parser.error("--cpu-time is for one thread: threads that wait also take time")
    return given


def main() -> None:
    given = arguments()
    if given.cpu_time:
        tuner.clock = time.process_time
    torch.set_num_threads(given.threads)
    todo = rows_to_measure(given)
    minutes = sum(shape.flops for *_, shape, _ in todo) / 1e9 * SECONDS / given.threads / 60
    print(f"{len(todo)} rows: about {minutes:.0f} minutes", flush=True)
    results = Results(given.json, ("network", "sizes", "direction", "threads"))
    for network, name, shape, direction in todo:
        sizes = "x".join(map(str, shape.x)) + " * " + "x".join(map(str, shape.w))
        row = {
            "network": network,
            "layer": name,
            "sizes": sizes + (f" /{shape.stride[0]}" if max(shape.stride) > 1 else ""),
            "direction": direction,
            "w": list(shape.w),
            "threads": given.threads,
            "gflops": measure(shape, direction),
        }
        results.add(row)
        print(line(row), flush=True)
    volumes_only = [row for row in results.rows if row["network"] == VOLUMES]
    others = [row for row in results.rows if row["network"] != VOLUMES]
    print("\n".join((summary(others) if others else []) + summary_3d(volumes_only)))


if __name__ == "__main__":
    main()
