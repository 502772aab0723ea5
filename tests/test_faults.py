"""A rank that dies, or is cut off: the others end in time and say what they waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from shardwise import LostPeer, Plan, capture, init_from_environment, parallelize
from shardwise.comm import Communicator
from shardwise.emulate import Emulation, Wiring

WORLD, TIMEOUT = 3, 20.0
VICTIM = 1
PHASES = {  # what the others wait for, as their message says it
    "forward": "exchange of conv0>0",
    "backward": "gradient",
    "sum": "sum of the gradients of",
    "checkpoint": "gather of head.",
}


class Dying(Communicator):
    """Kills its own process, as kill -9 would, when it first sends anything in a phase."""

    def __init__(self, phase: str) -> None:
        super().__init__()
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


def main(phase: str) -> None:
    """One rank: trains until somebody dies."""
    init_from_environment(timeout=TIMEOUT)
    torch.manual_seed(0)
    comm, x = Dying(phase), torch.rand(3, 2, 9, 6)
    split = {"f" if phase == "checkpoint" else "h": WORLD}  # weights that the others lack, or halos
    plan = Plan.uniform(capture(Net(), x), WORLD, **split)
    try:
        model = parallelize(Net(), plan, comm=comm)
        for step in range(10_000):
            ready = step == 2
            comm.now[0] = "forward" if ready else ""
            y = model(x)
            comm.now[0] = "backward" if ready else ""
            y.sum().backward()
            if phase == "checkpoint" and ready:
                comm.now[0] = "checkpoint"
                model.state_dict()
            print(f"step {step}", flush=True)
            if phase == "cut":
                time.sleep(0.05)
    except LostPeer as error:
        print(f"error: {error}", flush=True)
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(rank: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _ends(jobs: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What the survivors said; all must have ended by then."""
    deadline = time.monotonic() + seconds
    said = []
    for job in jobs:
        try:
            out, _ = job.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            out = "still running"
        said.append(out)
    for job in jobs:
        job.kill()
        job.wait()
    return said


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_end_when_a_rank_is_killed(phase: str) -> None:
    port = _free_port()
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, phase],
            env=_environment(rank, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(WORLD)
    ]
    said = _ends(jobs, 60 + TIMEOUT)
    assert jobs[VICTIM].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert jobs[rank].returncode == 3, said[rank]
        errors = [line for line in said[rank].splitlines() if line.startswith("error:")]
        assert len(errors) == 1, said[rank]
        assert "waited in vain for rank" in errors[0]
        assert PHASES[phase] in errors[0]
    assert any(f"for rank {VICTIM}" in text or f"{VICTIM}, " in text for text in said)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_others_end_when_a_link_is_cut() -> None:
    with Emulation(Wiring.of(WORLD, "1gbit")) as emulation:
        jobs = [
            emulation.start(
                host,
                [sys.executable, __file__, "cut"],
                _environment(host, 29500)
                | {"MASTER_ADDR": emulation.wiring.address(0), "GLOO_SOCKET_IFNAME": "eth0"},
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
            out, _ = jobs[host].communicate(timeout=60 + 2 * TIMEOUT)
            errors = [line for line in out.decode().splitlines() if line.startswith("error:")]
            assert jobs[host].returncode == 3 and len(errors) == 1
            assert "waited in vain for rank" in errors[0]
        assert time.monotonic() - start < 3 * TIMEOUT
        jobs[VICTIM].kill()
        jobs[VICTIM].communicate()
