"""Training steps of P1's networks on a CPU: P1's variants, tuned kernels, and stock PyTorch.

    python benchmarks/train_cpu.py [--networks vgg16_cifar,...] [--threads 1,2] [--batch N]
        [--variants stock,tuned,BASE,...] [--rounds 3] [--cpu-time] [--json FILE]

Prints images per second (forward, backward and an SGD step; the best of rounds that take turns),
the convolutions' workspace, and the peak of resident memory. `stock` is the better of NCHW and
channels last. BASE keeps every layer's im2col matrix for the backward pass, as P1 does. ImageNet
batches are smaller than P1's, so that BASE fits into this machine; --batch sets another. On a
machine that others use too, --cpu-time counts the time of the one thread instead of the clock's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import shardwise
from shardwise import zoo
from shardwise.accelerate import TunedConv2d
from shardwise.kernels import library, run, tuner
from shardwise.kernels.base import KeptColumns
from shardwise.kernels.run import Choice

NETWORKS = {  # samples per step
    "vgg16_cifar": 64,
    "resnet34_cifar": 64,
    "densenet121_cifar": 64,
    "googlenet_cifar": 64,
    "vgg16": 8,
    "resnet34": 24,
    "densenet121": 8,
    "googlenet": 16,
}
P1 = {  # P1's variants; PM is whether workspaces persist
    "BASE": (Choice("base", "base", "base"), False),
    "RDX": (Choice("convgemm", "base", "reindex"), False),
    "CGT": (Choice("convgemm", "base", "convgemm_trans"), False),
    "CGT+PM": (Choice("convgemm", "base", "convgemm_trans"), True),
    "CGT+DG": (Choice("convgemm", "deconvgemm", "convgemm_trans"), False),
}
clock = time.perf_counter
STOCK = ("stock NCHW", "stock channels last")
VARIANTS = (*STOCK, "tuned", *P1)


class BaseConv2d(nn.Conv2d):
    """P1's BASE; a convolution with groups has no use for it here."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return KeptColumns.apply(input, self.weight, self.bias, settings)


def variant(name: str, model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """The model that a variant trains, with its own weights, and its input."""
    model = copy.deepcopy(model)
    if name == "tuned":
        return shardwise.accelerate(model, x, layout="auto"), x
    if name == "stock channels last":
        form = torch.channels_last
        return model.to(memory_format=form), x.contiguous(memory_format=form)
    if name in P1:
        for module in model.modules():
            if type(module) is nn.Conv2d:
                module.__class__ = BaseConv2d if name == "BASE" else TunedConv2d
                module.choice = P1[name][0]  # type: ignore[assignment]
    return model, x


def trainer(model: nn.Module, x: torch.Tensor, y: torch.Tensor, persists: bool) -> Callable:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        run.persistent = persists
        start = clock()
        out = model(x)
        loss = nn.functional.cross_entropy(out if isinstance(out, torch.Tensor) else out[0], y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock() - start

    return step


def peak_bytes(step: Callable[[], float], kept_columns: bool) -> tuple[int, int]:
    """Peak resident memory of a step, and the most that convolutions took as workspace."""
    lib = library()
    gc.collect()
    if lib is not None:
        lib.release_arena()
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    saved = 0
    if kept_columns:

        def pack(t: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += t.numel() * t.element_size() if t.ndim == 1 and t.numel() > 1 << 12 else 0
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            step()
    else:
        step()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
    arena = lib.arena_peak_bytes() if lib is not None else 0
    return peak, arena + saved


def measure(network: str, batch: int, threads: int, names: list[str], rounds: int) -> list[dict]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = zoo.build(network)
    x = torch.randn(zoo.input_shape(network, batch))
    y = torch.randint(0, 10, (batch,))
    steps = {}
    for name in names:
        persists = P1[name][1] if name in P1 else True
        steps[name] = trainer(*variant(name, model, x), y, persists)
    memory = {name: peak_bytes(step, name == "BASE") for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 else reversed(names):
            times[name].append(steps[name]())
    return [
        {
            "network": network,
            "threads": threads,
            "batch": batch,
            "variant": name,
            "images per second": batch / min(times[name]),
            "resident MiB": memory[name][0] >> 20,
            "workspace MiB": memory[name][1] / 2**20,
        }
        for name in names
    ]


def rate(rows: list[dict], *names: str) -> float | None:
    found = [row["images per second"] for row in rows if row["variant"] in names]
    return max(found) if found else None


def summary(rows: list[dict]) -> list[str]:
    """The goals, over every network, size and number of threads that was measured."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["network"], row["threads"]), []).append(row)
    lines = []
    for title, over, under in (
        ("tuned / stock", ("tuned",), STOCK),
        ("CGT+PM / BASE", ("CGT+PM",), ("BASE",)),
    ):
        pairs = [(rate(run, *over), rate(run, *under)) for run in runs.values()]
        ratios = [a / b for a, b in pairs if a and b]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(
                f"{title}: {mean:.2f} in geometric mean, {min(ratios):.2f} to {max(ratios):.2f}, "
                f"{len(ratios)} runs"
            )
    spaces = {
        name: [row["workspace MiB"] for row in rows if row["variant"] == name]
        for name in ("BASE", "CGT+DG")
    }
    if all(spaces.values()):
        share = max(a / b for a, b in zip(spaces["CGT+DG"], spaces["BASE"], strict=True))
        lines.append(f"workspace of CGT+DG: at most {100 * share:.1f} % of BASE's")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--batch", type=int, help="samples per step, for every network")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != "1":
        parser.error("--cpu-time is for --threads 1: threads that wait also take time")
    if arguments.cpu_time:
        global clock
        clock = tuner.clock = time.process_time
    names = arguments.variants.replace("stock,", ",".join(STOCK) + ",").split(",")
    rows = []
    for network in arguments.networks.split(","):
        for threads in map(int, arguments.threads.split(",")):
            batch = arguments.batch or NETWORKS[network]
            found = measure(network, batch, threads, names, arguments.rounds)
            rows += found
            for row in found:
                print(
                    f"{row['network']:18} {threads} threads  batch {batch:3}  "
                    f"{row['variant']:20} {row['images per second']:8.2f} img/s  "
                    f"workspace {row['workspace MiB']:7.1f} MiB  "
                    f"resident {row['resident MiB']:5} MiB",
                    flush=True,
                )
    if arguments.json:
        old = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        again = {(row["network"], row["threads"], row["variant"]) for row in rows}
        old = [row for row in old if (row["network"], row["threads"], row["variant"]) not in again]
        rows = old + rows
        arguments.json.write_text(json.dumps(rows, indent=1))
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
