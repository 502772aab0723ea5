"""A rank that dies, or is cut off: the others end in time and say what they waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
from torch import nn

from pool import WorkerPool
from shardwise import LostPeer, Plan, capture, init_from_environment, parallelize
from shardwise.comm import Communicator
from shardwise.graph.layer_graph import LayerGraph
from shardwise.launch.emulate import Emulation, Wiring

WORLD, VICTIM = 3, 1
TIMEOUT = 4.0  # seconds for a message
PHASES = {  # what the others wait for, as their message says it
    "forward": ("exchange of conv0>0", "what all ranks must agree on"),
    "backward": ("gradient",),
    "sum": ("sum of the gradients of",),
    "checkpoint": ("gather of head.",),
}


class Dying(Communicator):
    """Kills its own process, as kill -9 would, when it first sends anything in a phase."""

    def __init__(self, phase: str) -> None:
        super().__init__(timeout=TIMEOUT if phase == "cut" else None)
        self.phase, self.now = phase, [""]

    def die(self) -> None:
        lane = "sum" if self.lane == "gradients" else self.now[0]
        if self.rank == VICTIM and lane == self.phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def exchange(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.die()
        return super().exchange(*args, **kwargs)

    def all_gather(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.die()
        return super().all_gather(*args, **kwargs)

    def all_reduce(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.die()
        return super().all_reduce(*args, **kwargs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(2, 4, 3, padding=1)
        self.conv1, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv1(self.conv0(x)).mean((2, 3)))


SHAPE = 3, 2, 9, 6


@cache
def graph() -> LayerGraph:
    return capture(Net(), torch.rand(SHAPE))


def train(phase: str, known: LayerGraph) -> str:
    """Trains until somebody dies; what is said then."""
    torch.manual_seed(0)
    comm, x = Dying(phase), torch.rand(SHAPE)
    split = {"f" if phase == "checkpoint" else "h": WORLD}  # weights that the others lack, or halos
    plan = Plan.uniform(known, WORLD, **split)
    try:
        model = parallelize(Net(), plan, comm=comm, graphs=lambda *_: known)
        for step in range(10_000):
            ready = step == 2
            comm.now[0] = "forward" if ready else ""
            y = model(x)
            comm.now[0] = "backward" if ready else ""
            y.sum().backward()
            if phase == "checkpoint" and ready:
                comm.now[0] = "checkpoint"
                model.state_dict()
            if phase == "cut":
                print(f"step {step}", flush=True)
                time.sleep(0.05)
    except LostPeer as error:
        return str(error)
    return ""


if __name__ == "__main__":
    init_from_environment(timeout=60.0)
    print(f"error: {train('cut', graph())}", flush=True)
    os._exit(3)


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_end_when_a_rank_is_killed(phase: str) -> None:
    workers = WorkerPool(WORLD)
    try:
        for connection in workers._connections:
            connection.send((train, (phase, graph())))
        workers._processes[VICTIM].join(60)
        assert workers._processes[VICTIM].exitcode == -signal.SIGKILL
        start = time.monotonic()
        for rank in (0, 2):
            assert workers._connections[rank].poll(10), "a survivor does not answer"
            kind, said = workers._connections[rank].recv()
            assert kind == "last result"
            assert "waited in vain for rank" in said and any(w in said for w in PHASES[phase])
        assert time.monotonic() - start < 5
    finally:
        workers.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_others_end_when_a_link_is_cut() -> None:
    with Emulation(Wiring.of(WORLD, "1gbit")) as emulation:
        jobs = [
            emulation.start(
                host,
                [sys.executable, __file__],
                _environment(host, emulation.wiring.address(0)),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for host in range(WORLD)
        ]
        for line in jobs[0].stdout or ():
            if line.startswith(b"step 5"):
                break
        assert emulation.start(VICTIM, ["ip", "link", "set", "eth0", "down"], {}).wait() == 0
        start = time.monotonic()
        for host in (0, 2):
            out, _ = jobs[host].communicate(timeout=60)
            errors = [line for line in out.decode().splitlines() if line.startswith("error:")]
            assert jobs[host].returncode == 3 and len(errors) == 1
            assert "waited in vain for rank" in errors[0]
        assert time.monotonic() - start < TIMEOUT + 20
        jobs[VICTIM].kill()
        jobs[VICTIM].communicate()


def _environment(rank: int, address: str) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
