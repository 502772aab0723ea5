"""Training steps of P1's networks on a CPU: P1's variants, tuned kernels, and stock PyTorch.

    python benchmarks/train_cpu.py [--networks vgg16_cifar,...] [--threads 1,2] [--batch N]
        [--variants stock,tuned,BASE,...] [--rounds 3] [--cpu-time] [--json FILE]

Prints images per second (forward, backward and an SGD step; the best of rounds that take turns),
the convolutions' workspace, and the peak of resident memory, with weights that all variants share.
`stock` is the better of NCHW and channels last. BASE keeps every layer's im2col matrix for the
backward pass, as P1 does. Batches are P1's at CIFAR-10 size; at ImageNet size they are smaller than
P1's (64, 24, 16, 16), so that BASE fits into 16 GiB; --batch sets another. On a machine that others
use too, --cpu-time counts the time of the one thread instead of the clock's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import shardwise
from kept_columns import KeptColumns
from results import Results, goal
from shardwise import zoo
from shardwise.kernels import dispatch, library, tuner
from shardwise.kernels.accelerate import TunedConv2d, convolutions
from shardwise.kernels.dispatch import KernelChoice
from shardwise.modules import copy_structure

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
    "BASE": (KernelChoice("base", "base", "base"), False),
    "RDX": (KernelChoice("convgemm", "base", "reindex"), False),
    "CGT": (KernelChoice("convgemm", "base", "convgemm_trans"), False),
    "CGT+PM": (KernelChoice("convgemm", "base", "convgemm_trans"), True),
    "CGT+DG": (KernelChoice("convgemm", "deconvgemm", "convgemm_trans"), False),
}
STOCK = ("stock NCHW", "stock channels last")
VARIANTS = (*STOCK, "tuned", *P1)
RATE = 60e9  # operations a second and thread, for the time that is announced
TUNING_STEPS = 40  # what timing every kernel takes, in steps

clock = time.perf_counter


class BaseConv2d(nn.Conv2d):
    """P1's BASE; a convolution with groups has no use for it here."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return KeptColumns.apply(input, self.weight, self.bias, settings)  # type: ignore[return-value]


@dataclass(frozen=True)
class Run:
    """One network at one batch size and number of threads."""

    network: str
    batch: int
    threads: int

    @property
    def x(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(zoo.input_shape(self.network, self.batch), generator=generator)

    def seconds(self, names: list[str], rounds: int) -> float:
        """What it will take, roughly."""
        one = torch.randn(zoo.input_shape(self.network, 1))
        flops = 3 * self.batch * sum(s.shape.flops for s in convolutions(self.build(), one))
        steps = len(names) * (rounds + 1) + ("tuned" in names) * TUNING_STEPS
        return steps * flops / (RATE * self.threads)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return zoo.build(self.network).eval()  # one sample has no batch statistics


def variant(name: str, model: nn.Module, x: torch.Tensor) -> nn.Module:
    """The model that a variant trains; all but stock channels last share their weights."""
    if name == "tuned":
        return shardwise.accelerate(model, x, layout="auto")
    if name == "stock channels last":
        return copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twin = copy_structure(model)
    for module in twin.modules() if name in P1 else ():
        if type(module) is nn.Conv2d:
            module.__class__ = BaseConv2d if name == "BASE" else TunedConv2d
            module.choice = P1[name][0]  # type: ignore[assignment]
    return twin


def trainer(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, persists: bool):  # type: ignore[no-untyped-def]
    y = torch.arange(len(x)) % 10

    def step() -> float:
        dispatch.persistent = persists
        start = clock()
        out = model(x)
        loss = nn.functional.cross_entropy(out if isinstance(out, torch.Tensor) else out[0], y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock() - start

    return step


def trainers(one: Run, names: list[str]) -> dict[str, Callable[[], float]]:
    model, x, steps = one.build().train(), one.x, {}
    shared = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for name in names:
        twin, own, form = variant(name, model, x), shared, torch.contiguous_format
        if name == "stock channels last":
            own = torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
            form = torch.channels_last
        persists = P1[name][1] if name in P1 else True
        steps[name] = trainer(twin, x.contiguous(memory_format=form), own, persists)
    return steps


def peak_bytes(step: Callable[[], float], kept_columns: bool) -> tuple[int, int]:
    """Peak resident memory of a step, and the most that convolutions took as workspace."""
    lib = library()
    gc.collect()
    if lib is not None:
        lib.lib.sw_arena_release()
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
    arena = lib.lib.sw_arena_peak() if lib is not None else 0
    return peak, arena + saved


def measure(one: Run, names: list[str], rounds: int) -> list[dict]:
    torch.set_num_threads(one.threads)
    steps = trainers(one, names)
    memory = {name: peak_bytes(step, name == "BASE") for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 else reversed(names):
            times[name].append(steps[name]())
    return [
        {
            "network": one.network,
            "threads": one.threads,
            "batch": one.batch,
            "variant": name,
            "images per second": one.batch / min(times[name]),
            "spread": max(times[name]) / min(times[name]) - 1,
            "resident MiB": memory[name][0] >> 20,
            "workspace MiB": memory[name][1] / 2**20,
        }
        for name in names
    ]


def line(row: dict) -> str:
    return (
        f"{row['network']:18} {row['threads']} threads  batch {row['batch']:3}  "
        f"{row['variant']:20} {row['images per second']:8.2f} img/s "
        f"(spread {100 * row['spread']:.0f} %)  "
        f"workspace {row['workspace MiB']:7.1f} MiB  resident {row['resident MiB']:5} MiB"
    )


def best(rows: list[dict], names: tuple[str, ...], figure: str) -> float | None:
    found = [row[figure] for row in rows if row["variant"] in names]
    return max(found) if found else None


def ratios(rows: list[dict], over: tuple[str, ...], under: tuple[str, ...], figure: str):  # type: ignore[no-untyped-def]
    """One for each network, size and number of threads that has both."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["network"], row["threads"], row["batch"]), []).append(row)
    pairs = [(best(run, over, figure), best(run, under, figure)) for run in runs.values()]
    return [a / b for a, b in pairs if a and b]


def summary(rows: list[dict]) -> list[str]:
    speed = "images per second"
    tuned, pm = ratios(rows, ("tuned",), STOCK, speed), ratios(rows, ("CGT+PM",), ("BASE",), speed)
    shares = ratios(rows, ("CGT+DG",), ("BASE",), "workspace MiB")
    lines = [
        goal("tuned / stock", tuned, 1.5, "runs"),
        f"tuned / stock, least: {min(tuned):.2f} (goal 1.00)" if tuned else "",
        goal("CGT+PM / BASE", pm, 1.25, "runs"),
        f"workspace of CGT+DG: at most {100 * max(shares):.1f} % of BASE's (goal 30 %)"
        if shares
        else "",
    ]
    return [text for text in lines if text]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--variants", default="stock,tuned," + ",".join(P1))
    parser.add_argument("--batch", type=int, help="samples per step, for every network")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread")
    given = parser.parse_args()
    if given.cpu_time and given.threads != "1":
        parser.error("--cpu-time is for --threads 1: threads that wait also take time")
    return given


def main() -> None:
    given = arguments()
    if given.cpu_time:
        global clock
        clock = tuner.clock = time.process_time
    asked = given.variants.split(",")
    names = [name for word in asked for name in (STOCK if word == "stock" else (word,))]
    runs = [
        Run(network, given.batch or NETWORKS[network], threads)
        for network in given.networks.split(",")
        for threads in map(int, given.threads.split(","))
    ]
    minutes = sum(one.seconds(names, given.rounds) for one in runs) / 60
    print(f"{len(runs)} runs of {len(names)} variants: about {minutes:.0f} minutes", flush=True)
    results = Results(given.json, ("network", "threads", "batch", "variant"))
    for one in runs:
        for row in measure(one, names, given.rounds):
            results.add(row)
            print(line(row), flush=True)
    print("\n".join(summary(results.rows)))


if __name__ == "__main__":
    main()
