"""Decoding one image on four hosts: planned, against one host and against bands of rows.

    python benchmarks/decode_latency.py [--links 10gbit 1gbit] [--sizes 20x16 36x28 52x44]

The decoder of a small autoencoder of diffusers, batch 1, under torch.inference_mode. Emulated hosts
are alike: each may use `share` of a core (a control group), and has a link of its own. One plan is
made for all sizes, under a limit of memory that one host breaks at the largest. Every round decodes
once each way: on one host, in bands of rows (h=4, as others do it), and as planned. Prints medians
with quartiles, what was predicted, and the memory; the image is wanted on one host. Then come sizes
that nobody planned for: the time until each runs for the first time, beyond that of the second
time, and by how much memory grows, beside what the plain module makes it grow: torch keeps kernels.
Needs root, for the emulated network and the control groups.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from hosts import machines, on_hosts, take_turns
from memory import reset_peak, resident
from outside_cases.autoencoders import Family
from results import save
from shardwise import Cluster, Plan, init_from_environment, parallelize
from shardwise.comm import Communicator
from shardwise.libraries.autoencoders import Decoding
from shardwise.measure.cluster_file import wanted_works
from shardwise.measure.timing import measure_works
from shardwise.model.capture import ModelGraphs
from shardwise.planner.best_plan import size as size_text
from shardwise.planner.layer_costs import Roofline
from shardwise.planner.layer_times import Measured, first_layers
from strong_scaling import groups, limit_cpu

WIDTHS = (32, 64, 64)
DECODER = Family(
    "AutoencoderKL",
    {"block_out_channels": WIDTHS, "latent_channels": 4, "norm_num_groups": 8}
    | {"layers_per_block": 1, "down_block_types": ("DownEncoderBlock2D",) * 3}
    | {"up_block_types": ("UpDecoderBlock2D",) * 3},
    (1, 4, 20, 16),
)
NEW = 100  # sizes that nobody planned for


def latents(size: tuple[int, int]) -> torch.Tensor:
    return torch.randn(DECODER.of_size(*size), generator=torch.Generator().manual_seed(0))


def timer(comm: Communicator, graph: Any, cluster: Cluster, share: float) -> Measured:
    """What every share of every layer takes on a host that has so much of a core.

    Each host times some of them; what counts is its own time on a core.
    """
    wanted = wanted_works([graph], comm.size)[comm.rank :: comm.size]
    seconds = measure_works(wanted, runs=2, clock=time.thread_time)
    own = {key: (there / share, back / share) for key, (there, back) in seconds.items()}
    times = dict(item for part in comm.gather_objects(own) for item in part.items())
    return Measured((times,), Roofline(cluster.device), first_layers(graph))


def worker(arguments: argparse.Namespace) -> None:
    """On every host: rounds of one image each way, size by size, then new sizes."""
    rank, group = int(os.environ["RANK"]), Path(arguments.groups[int(os.environ["RANK"])])
    init_from_environment()
    torch.set_num_threads(1)
    comm = Communicator()
    limit_cpu(group, arguments.share)
    cluster = machines(comm, arguments.link)
    limit_cpu(group, None)  # planning is no part of decoding
    module = Decoding(DECODER.build(), {}).eval()
    sizes = [tuple(map(int, text.split("x"))) for text in arguments.sizes]
    shapes = [DECODER.of_size(*size) for size in sizes]
    graphs = ModelGraphs(module, (shapes[0],), sizes_vary=True)
    found: dict[str, Any] = {"sizes": {}}
    with torch.inference_mode():
        for size, shape in zip(sizes, shapes, strict=True):
            graph = graphs(False, (shape,))
            times = timer(comm, graph, cluster, arguments.share)
            made = shardwise.plan(
                graph,
                cluster=cluster,
                memory=arguments.memory,
                timer=times,
                inference=True,
                output="one",
            )
            plans = {
                "rows": Plan.uniform(graph, h=comm.size),
                "planned": Plan.from_json(comm.gather_objects(made.to_json())[0]),
            }
            found["sizes"]["x".join(map(str, size))] = of_size(
                comm, module, latents(size), made, plans, graphs, group, arguments
            )
        found["new"] = new_sizes(comm, module, plans["planned"], graphs, shapes[-1])
    if rank == 0:
        arguments.json.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def of_size(
    comm: Communicator,
    module: Any,
    z: torch.Tensor,
    made: Plan,
    plans: dict[str, Plan],
    graphs: ModelGraphs,
    group: Path,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    how = {"graphs": graphs, "output": "one"}
    models = {name: parallelize(module, p, **how).eval() for name, p in plans.items()}
    steps = {"one host": lambda: module(z) if comm.rank == 0 else None}
    steps |= {name: lambda model=model: model(z) for name, model in models.items()}
    held = {name: max(comm.gather_objects(added(step))) for name, step in steps.items()}
    limit_cpu(group, arguments.share)
    turns = take_turns(comm, steps, arguments.rounds)
    limit_cpu(group, None)
    findings = made.findings
    return {
        "seconds": {name: own["seconds"] for name, own in turns.items()},
        "memory": held,
        "predicted": {
            "one host": findings.rivals["one worker"].step_seconds,
            "planned": findings.trace.seconds,
        },
        "limit": findings.prediction.memory,
        "splits": sorted({str(config) for config in plans["planned"].layers.values()}),
    }


def added(step: Any) -> int:
    step()
    reset_peak()
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def new_sizes(
    comm: Communicator, module: Any, plan: Plan, graphs: ModelGraphs, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Milliseconds of this process's own time until a size runs, and what stays in memory."""
    model = parallelize(module, plan, graphs=graphs).eval()
    model(torch.zeros(1, 4, 9, 9))
    gc.collect()
    gc.freeze()  # as servers do: what is there will stay
    found: dict[str, Any] = {}
    for name, each in {"alone": module, "split": model}.items():
        extra, kept = [], []
        for number in random.Random(0).sample(range(NEW), NEW):
            z = torch.zeros(1, 4, 10 + number % 10, 10 + number // 10)
            first, second = (own_time(each, z) for _ in range(2))
            extra.append(1e3 * (first - second))
            kept.append(resident("VmRSS"))
        found |= {name: extra, f"{name} growth": kept[-1] - kept[NEW // 2]}
    return found


def own_time(model: Any, z: torch.Tensor) -> float:
    start = time.process_time()
    model(z)
    return time.process_time() - start


def show(link: str, found: dict[str, Any], limit: str) -> None:
    print(f"\nlinks of {link}, at most {limit} a host", flush=True)
    print(f"{'latents':<10}{'':<10}{'ms':>8}{'quartiles':>16}{'predicted':>11}{'memory':>11}")
    for size, own in found["sizes"].items():
        for name, seconds in own["seconds"].items():
            low, median, high = (1e3 * each for each in statistics.quantiles(seconds, n=4))
            ahead = own["predicted"].get(name)
            text = "" if ahead is None else f"{1e3 * ahead:.0f}"
            print(
                f"{size:<10}{name:<10}{median:>8.0f}{f'{low:.0f} to {high:.0f}':>16}{text:>11}"
                f"{size_text(own['memory'][name]):>11}"
            )
        print(f"          {', '.join(own['splits'])}; predicted {size_text(own['limit'])}")
    new, ms = found["new"], sorted(found["new"]["split"])
    print(
        f"{len(ms)} new sizes: {statistics.median(ms):.0f} ms until one runs, 9 of 10 within "
        f"{ms[len(ms) * 9 // 10]:.0f}, the longest {ms[-1]:.0f}; memory grew by "
        f"{size_text(max(new['split growth'], 0))} over the last half, that of the plain module by "
        f"{size_text(max(new['alone growth'], 0))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="*", default=["10gbit", "1gbit"])
    parser.add_argument("--sizes", nargs="*", default=["20x16", "36x28", "52x44"])
    parser.add_argument("--memory", default="24MiB", help="that a host may use")
    parser.add_argument("--share", type=float, default=0.4, help="of a core, for each host")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--groups", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    if arguments.worker:
        worker(arguments)
        return
    options = ["--sizes", *arguments.sizes, "--memory", arguments.memory]
    options += ["--rounds", str(arguments.rounds), "--share", str(arguments.share)]
    rows = {}
    for link in arguments.links:
        with groups(4) as made:
            rows[link] = on_hosts(__file__, 4, link, [*options, "--groups", *map(str, made)])
        show(link, rows[link], arguments.memory)
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
