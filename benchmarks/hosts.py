"""What benchmarks on emulated hosts share: a start there, the cluster, turns and bytes."""

from __future__ import annotations

import json
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
from shardwise.parallel import ParallelModel
from shardwise.probe import measure_speeds

Step = Callable[[], Any]
COUNTERS = "/sys/class/net"


def stepper(
    model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, count: int = 1
) -> Step:
    """So many steps of training, until nothing that they began is under way."""

    def step() -> None:
        for _ in range(count):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(model, ParallelModel):
            model.flush()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def on_hosts(script: str, hosts: int, link: str, options: Sequence[str]) -> Any:
    """Runs a script with --worker on every emulated host; returns what its rank 0 wrote as JSON."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        emulate = [sys.executable, "-m", "shardwise", "emulate"]
        emulate += ["--hosts", str(hosts), "--link", link, "--"]
        command = [sys.executable, script, "--worker", "--link", link, *options]
        subprocess.run([*emulate, *command, "--json", str(out)], check=True)
        return json.loads(out.read_text())


def machines(comm: Communicator, link: str) -> Cluster:
    """The emulated hosts, with the speed that computation has on all of them at once."""
    speeds = comm.gather_objects(measure_speeds(comm))
    cluster = Cluster.load(f"{comm.size}x{link.replace('gbit', 'Gb').replace('mbit', 'Mb')}")
    device = cluster.device.model_copy(
        update={
            "flops": statistics.median(s.flops for s in speeds),
            "memory_bandwidth": statistics.median(s.memory_bandwidth for s in speeds),
        }
    )
    return cluster.model_copy(update={"device": device})


def bytes_sent() -> int:
    """By this host so far, as its network card counts them."""
    cards = [card for card in Path(COUNTERS).iterdir() if card.name != "lo"]
    return sum(int((card / "statistics" / "tx_bytes").read_text()) for card in cards)


def take_turns(
    comm: Communicator, steps: Mapping[str, Step], rounds: int, warm: int = 1
) -> dict[str, dict[str, list[float]]]:
    """Rounds of one step of each; seconds of the slowest rank, and the bytes of all hosts."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "bytes": []} for name in steps
    }
    for number in range(rounds + warm):
        for name, step in steps.items():
            dist.barrier()
            sent, start = bytes_sent(), time.perf_counter()
            step()
            mine = (time.perf_counter() - start, bytes_sent() - sent)
            ranks = comm.gather_objects(mine)
            if number >= warm:
                found[name]["seconds"].append(max(seconds for seconds, _ in ranks))
                found[name]["bytes"].append(float(sum(sent for _, sent in ranks)))
    return found
