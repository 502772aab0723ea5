"""What benchmarks on emulated hosts share: a start there, the cluster, turns and bytes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import Cluster
from shardwise.comm import Communicator
from shardwise.graph.layer_graph import LayerGraph
from shardwise.measure.cluster_file import wanted_works
from shardwise.measure.timing import measure_speeds, measure_works
from shardwise.planner.layer_costs import Roofline
from shardwise.planner.layer_times import Measured, first_layers
from shardwise.runtime.parallel import ParallelModel

Step = Callable[[], Any]


def stepper(
    model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, count: int = 1
) -> Step:
    """So many steps of training, until nothing that they began is under way."""

    def step() -> None:
        for _ in range(count):
            _loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(model, ParallelModel):
            model.flush()

    return step


def _loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    """Of a classifier; that of an auxiliary one beside it counts 0.3, as in GoogLeNet's paper."""
    whole, *others = output if isinstance(output, tuple) else (output,)
    loss = nn.functional.cross_entropy(whole, y)
    return sum((0.3 * nn.functional.cross_entropy(other, y) for other in others), loss)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def on_hosts(
    script: str, hosts: int, link: str, options: Sequence[str], wires: Sequence[str] = ()
) -> Any:
    """Runs a script with --worker on every emulated host; returns what its rank 0 wrote as JSON."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        emulate = [sys.executable, "-m", "shardwise", "emulate"]
        emulate += ["--hosts", str(hosts), "--link", link, *wires, "--"]
        command = [sys.executable, script, "--worker", "--link", link, *options]
        subprocess.run([*emulate, *command, "--json", str(out)], check=True)
        return json.loads(out.read_text())


def machines(comm: Communicator, link: str, messages: bool = True) -> Cluster:
    """The emulated hosts, with what computation and messages take on all of them at once.

    Messages seem slow where hosts have less than a core: they wait for their share of it.
    """
    speeds = comm.gather_objects(measure_speeds(comm))
    cluster = Cluster.load(f"{comm.size}x{link.replace('gbit', 'Gb').replace('mbit', 'Mb')}")

    def found(*names: str) -> dict[str, float]:
        return {n: statistics.median(getattr(own, n) for own in speeds) for n in names}

    device = cluster.device.model_copy(update=found("flops", "memory_bandwidth", "launch"))
    names = ("latency", "post", "overlap", "sum_latency", "sum_bandwidth")
    measured = found(*names) if messages else {}
    port = cluster.links[0].model_copy(update=measured)
    return cluster.model_copy(update={"device": device, "links": (port, *cluster.links[1:])})


def layer_times(
    comm: Communicator, graph: LayerGraph, cluster: Cluster, crowd: float | None = None
) -> Measured:
    """What every share of every layer takes on hosts that share the cores of this machine.

    Each host times some of them while the others are busy with theirs. What counts is its own time
    on a core, times the hosts per core (`crowd`, if not as many as there are): most layers are done
    before another host has its turn.
    """
    wanted = wanted_works([graph], comm.size)[comm.rank :: comm.size]
    crowd = crowd or max(1.0, comm.size / (os.cpu_count() or 1))
    seconds = measure_works(wanted, runs=2, clock=time.thread_time)
    own = {key: (crowd * there, crowd * back) for key, (there, back) in seconds.items()}
    times = dict(item for part in comm.gather_objects(own) for item in part.items())
    return Measured((times,), Roofline(cluster.device), first_layers(graph))


def card_bytes(pid: int | str) -> tuple[int, int]:
    """What the card of a process's host has received and sent."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = counts.split()
            return int(fields[0]), int(fields[8])
    return 0, 0


def bytes_sent() -> int:
    """By this host so far, as its network card counts them."""
    return card_bytes("self")[1]


def take_turns(
    comm: Communicator, steps: Mapping[str, Step], rounds: int, warm: int = 1
) -> dict[str, dict[str, list[float]]]:
    """Rounds of one step of each; seconds of the slowest rank, bytes and busy seconds of all.

    And of the busiest rank: where hosts share cores, it may have had more than its share of them.
    """
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "bytes": [], "computing": [], "busiest": []} for name in steps
    }
    for number in range(rounds + warm):
        for name, step in steps.items():
            dist.barrier()
            sent, busy, start = bytes_sent(), time.process_time(), time.perf_counter()
            step()
            mine = time.perf_counter() - start, bytes_sent() - sent, time.process_time() - busy
            seconds, moved, computing = zip(*comm.gather_objects(mine), strict=True)
            if number >= warm:
                found[name]["seconds"].append(max(seconds))
                found[name]["bytes"].append(float(sum(moved)))
                found[name]["computing"].append(sum(computing))
                found[name]["busiest"].append(max(computing))
    return found
