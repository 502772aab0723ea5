"""MPI: what mpirun starts computes what one device computes, and fails as a whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardwise.launch.launchers import LAUNCHERS

BIN = Path(sys.executable).parent
MPIRUN = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
TIMEOUT = 150.0  # seconds before a job is given up

pytestmark = pytest.mark.skipif(
    MPIRUN is None or find_spec("mpi4py") is None,
    reason="needs mpi4py and mpirun: pip install mpi4py mpich",
)


def mpirun(*command: object, ranks: int = 4) -> tuple[int, str]:
    """The exit code and the output of a command on so many ranks."""
    environment = {k: v for k, v in os.environ.items() if k not in sum(LAUNCHERS, ())}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [str(MPIRUN), "-n", str(ranks), *map(str, command)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)  # which mpirun hands on to all ranks
        output, _ = job.communicate(timeout=10)
        raise AssertionError(f"the job did not end within {TIMEOUT:g} s:\n{output}") from None
    return job.returncode, output


RANKS = Path(__file__).parents[1] / "mpi_ranks.py"


@pytest.fixture(scope="module")
def passed() -> str:
    """The cases that passed, line by line: one job runs them all, as starting it takes seconds."""
    code, output = mpirun(sys.executable, RANKS)
    assert code == 0, output
    return output


@pytest.mark.parametrize("kind, least", [("operation", 60), ("operator", 6), ("training", 4)])
def test_four_ranks_of_mpi_compute_what_one_device_computes(
    passed: str, kind: str, least: int
) -> None:
    assert passed.count(f"passed {kind}: ") >= least


def test_shardwise_train_learns_under_mpirun() -> None:
    code, output = mpirun(BIN / "shardwise", "train", "--epochs", 1, ranks=2)
    assert code == 0, output
    assert "digits on 2 workers" in output and output.count("test accuracy") == 2


def test_shardwise_verify_proves_a_plan_under_mpirun() -> None:
    code, output = mpirun(BIN / "shardwise", "verify", "digits", ranks=2)
    assert code == 0, output
    assert "1 plan on 2 workers" in output and "equal to one device" in output


@pytest.mark.parametrize(
    "how, message",
    [("raise", "ValueError: rank 1 has had enough"), ("exit", "error: a mistake"), ("kill", "")],
)
def test_a_rank_that_fails_ends_the_job_at_once(how: str, message: str) -> None:
    start = time.monotonic()
    code, output = mpirun(sys.executable, RANKS, how, ranks=2)
    assert code != 0 and message in output, output
    assert time.monotonic() - start < 50  # the other rank would wait for a minute


def test_ranks_of_mpi_that_do_not_do_the_same_thing_are_told_so() -> None:
    code, output = mpirun(sys.executable, RANKS, "differ", ranks=2)
    assert code != 0
    for rank in (0, 1):
        (told,) = re.findall(rf"told rank {rank}: (.*)", output)
        for side in ("80,000 bytes of float32 for 'layer 0'", "80,004 bytes of float32 for 'layer"):
            assert side in told
