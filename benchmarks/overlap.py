"""Hiding communication: VGG-A on four emulated hosts, against PyTorch's DistributedDataParallel.

    python benchmarks/overlap.py [--hosts 4] [--link 1gbit] [--batches 16 64] [--rounds 5]

Images of 64x64, fully connected layers of 4096. Every round runs three steps in a row of each: DDP,
samples split without overlap, with two chunks (k found in the first rounds), with replicated
gradients of the first two linear layers and delayed updates (P3), the same with all updates delayed
(each layer waits for its own sum, the last layer's starts last), the planner's plan, and the bound:
the same share of samples on every host with no network. Prints the median with quartiles, the
speed-up over DDP, the overlap ratio R (P3) and the exposed seconds. Aims at batch 16: replicated
gradients 2x, the planner's plan 3x faster than DDP. Needs root for the emulated network.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from hosts import Step, machines, on_hosts, sgd, stepper
from results import save
from shardwise import Engine, Plan, capture, init_from_environment, parallelize
from shardwise.comm import Communicator
from shardwise.zoo.vgg import VGG, VGG11

SIZE = 64
STEPS = 3  # that are timed together: what one begins may end in the next
KS = (3, 5, 7, 9)  # chunks that are tried; P3 found 9 of VGG-A's layers best


def build() -> nn.Module:
    torch.manual_seed(0)
    return VGG(VGG11, pooled=2, dropout=0.0)


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, SIZE, SIZE, generator=generator)
    return x, torch.randint(0, 1000, (batch,), generator=generator)


def variants(batch: int, link: str) -> dict[str, tuple[nn.Module, Step]]:
    comm = Communicator()
    x, y = inputs(batch)
    share = slice(comm.rank * batch // comm.size, (comm.rank + 1) * batch // comm.size)
    graph = capture(build(), x)
    samples = Plan.uniform(graph, comm.size, n=comm.size)
    linear = [layer.name for layer in graph.layers if layer.op == "linear"][:2]
    replicated = Plan.make(
        graph,
        comm.size,
        lambda la: dataclasses.replace(
            samples.config(la, graph), gradient="gather" if la.name in linear else "sum"
        ),
    )
    planned = shardwise.plan(build(), x, cluster=machines(comm, link))
    planned = Plan.from_json(comm.gather_objects(planned.to_json())[0])
    found: dict[str, tuple[nn.Module, Step]] = {}

    def add(name: str, plan: Plan, engine: Engine, delayed: bool = False) -> None:
        model = parallelize(build(), plan, gradients=engine)
        made = shardwise.optimizer(model, torch.optim.SGD, lr=1e-3) if delayed else sgd(model)
        found[name] = (model, stepper(model, made, x, y, STEPS))

    ddp = DistributedDataParallel(build())
    found["DDP"] = (ddp, stepper(ddp, sgd(ddp), x[share], y[share], STEPS))
    add("no overlap", samples, Engine("end"))
    for k in KS:
        add(f"k={k}", samples, Engine("chunks", last=k))
    add("f=2", replicated, Engine("layer"), delayed=True)
    add("f=2, late", replicated, Engine("layer", wait="use", held=1), delayed=True)
    add("planned", planned, Engine("buckets"), delayed=True)
    alone = build()
    found["bound"] = (alone, stepper(alone, sgd(alone), x[share], y[share], STEPS))
    return found


def run(batch: int, link: str, rounds: int) -> dict[str, Any]:
    """On every host: rounds of one step of each variant."""
    comm, made = Communicator(), variants(batch, link)
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, (_, step) in made.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds = max(comm.gather_objects(time.perf_counter() - start)) / STEPS
            if number:
                times[name].append(seconds)
        if number == 1:  # the best k goes on, the others give their memory back
            best = min((n for n in made if n.startswith("k=")), key=lambda n: times[n][0])
            for name in [n for n in made if n.startswith("k=") and n != best]:
                del made[name], times[name]
    overlaps = {}
    for name, (model, step) in made.items():
        if hasattr(model, "record"):
            with model.record() as trace:  # type: ignore[operator]
                step()
            overlaps[name] = (trace.overlap, float(trace.exposed.mean()) / STEPS)
    return {"times": times, "overlaps": overlaps}


def worker(arguments: argparse.Namespace) -> None:
    init_from_environment()
    torch.set_num_threads(1)
    batch = arguments.batches[0]
    found = run(batch, arguments.link, arguments.rounds)
    if dist.get_rank() == 0:
        arguments.json.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def show(batch: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    times = {name: statistics.quantiles(own, n=4) for name, own in found["times"].items()}
    rows = []
    print(f"\nglobal batch {batch}")
    head = ("", "s/step", "quartiles", "over DDP", "of bound", "R", "exposed s")
    print("{:<12}{:>8}{:>16}{:>10}{:>10}{:>8}{:>11}".format(*head))
    for name, (low, median, high) in times.items():
        gain, part = times["DDP"][1] / median, times["bound"][1] / median
        overlap, exposed = found["overlaps"].get(name, (None, None))
        ratio = f"{100 * overlap:.0f} %" if overlap is not None else ""
        waits = f"{exposed:.3f}" if exposed is not None else ""
        print(
            f"{name:<12}{median:>8.3f}{f'{low:.2f} to {high:.2f}':>16}{gain:>9.2f}x"
            f"{100 * part:>8.0f} %{ratio:>8}{waits:>11}"
        )
        rows.append({"batch": batch, "variant": name, "seconds": median, "quartiles": [low, high]})
        rows[-1] |= {"over_ddp": gain, "of_bound": part, "overlap": overlap, "exposed": exposed}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    rows = []
    for batch in arguments.batches:
        options = ["--batches", str(batch), "--rounds", str(arguments.rounds)]
        found = on_hosts(__file__, arguments.hosts, arguments.link, options)
        rows += show(batch, found)
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
