"""Strong scaling beyond the batch (P2): two volumes on 2, 4 and 8 hosts, one too large for a rank.

    python benchmarks/strong_scaling.py [--hosts 2 4 8] [--link 1gbit] [--size 48] [--share 0.2]

Two volumes through the 3-D U-Net: splitting samples uses two hosts however many there are. Emulated
hosts are alike, whatever their number: each may use `share` of a core (a control group), and has a
link of its own. Every round runs one step of each plan: samples, samples and height, and the
planner's. Prints the median step with quartiles, and the speed-up over samples on the first number
of hosts. Then a volume is trained on one rank and on four, each of which may have half the memory
(RLIMIT_AS) that one rank needs: one must fail, four must train to the loss of one without a limit.
Needs root, for the emulated network and the control groups.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from hosts import machines, on_hosts, take_turns
from results import save
from shardwise import Cluster, Plan, capture, init_from_environment, parallelize, run_local, zoo
from shardwise.comm import Communicator
from shardwise.geometry.box import Box
from shardwise.planner.best_plan import predict, size
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training

BATCH = 2
CLASSES = 3
PERIOD = 5000  # microseconds; short, so that ranks that wait for each other are held up alike
TRAINING = Training(states=1, output="local")
Step = Callable[[], float]

# -- control groups --------------------------------------------------------------------------------


def cpu_group(name: str) -> Path:
    """A new control group of CPUs; version 1 where it is mounted, else version 2."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group = (first if (first / "cpu.cfs_quota_us").exists() else second) / name
    group.mkdir()
    return group


def limit_cpu(group: Path, share: float | None) -> None:
    """From now on this process may use so much of a core, or (None) all that there is."""
    quota = None if share is None else int(share * PERIOD)
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text("-1" if quota is None else str(quota))
    else:
        (group / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD}")
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def groups(count: int) -> Iterator[list[Path]]:
    """Control groups that are removed in the end; their processes have ended by then."""
    made: list[Path] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that they go then too
    try:
        for host in range(count):
            made.append(cpu_group(f"shardwise-{os.getpid()}-{host}"))
        yield made
    finally:
        for group in made:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)


# -- steps -----------------------------------------------------------------------------------------


def volumes(batch: int, edge: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 1, edge, edge, edge, generator=generator)
    return x, torch.randint(0, CLASSES, (batch, edge, edge, edge), generator=generator)


def stepper(plan: Plan | None, batch: int, edge: int) -> Step:
    """One training step under a plan, or of the plain model; it returns this rank's loss."""
    torch.manual_seed(0)
    model, (x, y) = zoo.build("unet3d"), volumes(batch, edge)
    more: dict[str, Any] = {}
    if plan is not None:
        model, more = parallelize(model, plan, output="local"), {"batch": batch}
        x = x[model.input_box(batch).slices_in(Box.whole(tuple(x.shape)))].clone()
        cut = model.output_box(batch).slices_in(Box.whole((batch, CLASSES, edge, edge, edge)))
        y = y[cut[:1] + cut[2:]].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(model(x, **more), y, reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


# -- batch 2 on more hosts -------------------------------------------------------------------------


def plans(comm: Communicator, cluster: Cluster, edge: int) -> dict[str, Plan]:
    x, _ = volumes(BATCH, edge)
    graph, hosts = capture(zoo.build("unet3d"), x), comm.size
    found = {"samples": Plan.uniform(graph, hosts, n=min(BATCH, hosts))}
    if hosts > BATCH:
        found["samples, height"] = Plan.uniform(graph, hosts, n=BATCH, h=hosts // BATCH)
        made = shardwise.plan(graph, cluster=cluster, training=TRAINING)
        found["planned"] = Plan.from_json(comm.gather_objects(made.to_json())[0])
    return found


def worker(arguments: argparse.Namespace) -> None:
    """On every host: rounds of one step of each plan."""
    rank = int(os.environ["RANK"])
    init_from_environment()
    torch.set_num_threads(1)
    comm, group = Communicator(), Path(arguments.groups[rank])
    limit_cpu(group, arguments.share)
    cluster = machines(comm, arguments.link, messages=False)
    limit_cpu(group, None)  # planning is no part of a step
    chosen = plans(comm, cluster, arguments.size)
    steps = {name: stepper(plan, BATCH, arguments.size) for name, plan in chosen.items()}
    limit_cpu(group, arguments.share)
    turns = take_turns(comm, steps, arguments.rounds)
    times = {name: own["seconds"] for name, own in turns.items()}
    splits = {name: sorted({str(c) for c in p.layers.values()}) for name, p in chosen.items()}
    if rank == 0:
        arguments.json.write_text(json.dumps({"times": times, "splits": splits}))
    dist.barrier()
    dist.destroy_process_group()


def measured(hosts: int, arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--size", str(arguments.size), "--rounds", str(arguments.rounds)]
    options += ["--share", str(arguments.share)]
    with groups(hosts) as made:
        options += ["--groups", *map(str, made)]
        return on_hosts(__file__, hosts, arguments.link, options)


def scaling(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"two volumes of {arguments.size}^3, hosts of {arguments.share} core and "
        f"{arguments.link}\n{'hosts':<7}{'plan':<18}{'s/step':>8}{'quartiles':>16}{'speed-up':>10}"
    )
    rows, base = [], 0.0
    for hosts in arguments.hosts:
        found = measured(hosts, arguments)
        for name, own in found["times"].items():
            low, median, high = statistics.quantiles(own, n=4)
            base = base or median
            quartiles = f"{low:.2f} to {high:.2f}"
            print(f"{hosts:<7}{name:<18}{median:>8.2f}{quartiles:>16}{base / median:>9.2f}x")
            rows.append({"hosts": hosts, "plan": name, "seconds": median, "speedup": base / median})
            rows[-1] |= {"quartiles": [low, high], "splits": found["splits"][name]}
    return rows


# -- a volume that is too large --------------------------------------------------------------------


def virtual() -> int:
    """Bytes of address space that this process uses."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmSize"))) * 1024


def train(plan: Plan | None, edge: int, limit: int | None) -> float | str:
    """The loss after three steps, or why it could not be had, under a limit on memory."""
    torch.set_num_threads(1)
    warm = torch.nn.Conv3d(2, 2, 3)(torch.zeros(1, 2, 8, 8, 8, requires_grad=True))
    warm.sum().backward()  # libraries are loaded
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (virtual() + limit,) * 2)
    try:
        step = stepper(plan, 1, edge)
        return [step() for _ in range(3)][-1]
    except (RuntimeError, MemoryError) as error:
        if plan is not None:
            raise
        return str(error).splitlines()[0]


def too_large(workers: int, edge: int) -> dict[str, Any]:
    graph = capture(zoo.build("unet3d"), volumes(1, edge)[0])
    one = Plan.uniform(graph, n=1)
    costs = Costs(graph, Cluster.load("local").with_workers(1), training=TRAINING)
    limit = predict(one, costs).memory // 2
    split = Plan.uniform(graph, h=2, w=workers // 2)
    # Two ranks that know nothing of each other: one alone would be this process itself.
    free, _ = run_local(train, 2, None, edge, None)
    alone, _ = run_local(train, 2, None, edge, limit)
    parts = run_local(train, workers, split, edge, limit)
    print(f"\none volume of {edge}^3, at most {size(limit)} for what a rank trains with")
    print(f"one rank: {alone if isinstance(alone, str) else 'trained, LIMIT NOT ENFORCED'}")
    loss = sum(float(part) for part in parts)
    error = abs(loss / float(free) - 1)
    print(f"{workers} ranks ({next(iter(split.layers.values()))}): loss {loss:.6g} after 3 steps,")
    print(f"one rank without a limit: {float(free):.6g} (relative difference {error:.1e})")
    return {"edge": edge, "limit": limit, "alone": alone, "loss": loss, "without limit": free}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--share", type=float, default=0.2, help="of a core, for each host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--edge", type=int, default=80, help="of the volume that is too large")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--groups", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    # Large tensors go back to the system when they are freed.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    found = {"scaling": scaling(arguments), "too large": too_large(4, arguments.edge)}
    save(arguments.json, found)


if __name__ == "__main__":
    main()
