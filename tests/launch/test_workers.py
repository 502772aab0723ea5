"""Local workers: results, errors, and nobody left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError, WorkerError
from shardwise.launch.launchers import (
    LAUNCHERS,
    SLURM_HOSTS,
    SLURM_PER_HOST,
    _check_address,
    _has_mpi,
    _launched,
    under_launcher,
)
from shardwise.launch.workers import run_local


def rank_and_sum(offset: int) -> tuple[int, float]:
    x = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(x)
    return dist.get_rank(), x.item()


def fail_on_rank_1(error: Exception) -> None:
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def write_pid_and_wait(folder: str) -> None:
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(600)


def add_rank(x: torch.Tensor) -> torch.Tensor:
    return x + dist.get_rank()


def own_pid() -> int:
    return os.getpid()


@pytest.fixture(autouse=True)
def nobody_left_behind():
    """Every process a test started has ended; the pool's own workers live on."""
    before = {process.pid for process in multiprocessing.active_children()}
    yield
    assert {process.pid for process in multiprocessing.active_children()} <= before


def test_results_come_in_rank_order() -> None:
    assert run_local(rank_and_sum, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_tensors_go_there_and_back() -> None:
    zeros, ones = run_local(add_rank, 2, torch.zeros(3))
    assert zeros.tolist() == [0.0] * 3 and ones.tolist() == [1.0] * 3


def test_one_worker_is_this_process() -> None:
    assert run_local(own_pid, 1) == [os.getpid()]


def test_no_workers_is_an_error() -> None:
    with pytest.raises(ShardwiseError, match="at least 1"):
        run_local(own_pid, 0)


def test_an_error_of_the_user_is_one_sentence() -> None:
    with pytest.raises(ShardwiseError) as caught:
        run_local(fail_on_rank_1, 2, ShardwiseError("the plan is wrong"))
    assert str(caught.value) == "the plan is wrong"


def test_any_other_error_names_the_rank_and_shows_the_traceback() -> None:
    with pytest.raises(WorkerError, match=r"(?s)worker 1 of 2 .*fail_on_rank_1.*KeyError: 'x'"):
        run_local(fail_on_rank_1, 2, KeyError("x"))


def fail_in_a_sum(error: Exception) -> None:
    comm = Communicator()
    comm.prepare([])
    if comm.rank == 1:
        time.sleep(0.2)  # the other rank hears of it, and may report first
        comm.abort(str(error))
        time.sleep(0.2)
        raise error
    comm.all_reduce((0, 1), torch.ones(3)).wait()


def test_the_rank_that_failed_first_is_the_one_that_is_reported() -> None:
    with pytest.raises(ShardwiseError) as caught:
        run_local(fail_in_a_sum, 2, ShardwiseError("the plan is wrong"))
    assert str(caught.value) == "the plan is wrong"
    with pytest.raises(WorkerError, match=r"(?s)worker 1 of 2 .*fail_in_a_sum.*KeyError: 'x'"):
        run_local(fail_in_a_sum, 2, KeyError("x"))


def test_a_killed_rank_ends_the_others_within_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1 of 3 was killed by SIGKILL"):
        run_local(die_on_rank_1, 3)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_when_their_parent_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    code = (  # a shell in the background starts processes that ignore SIGINT
        "import signal, sys, test_workers as t; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "t.run_local(t.write_pid_and_wait, 2, sys.argv[1])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "0", tmp_path / "1"]
    assert _eventually(lambda: all(f.exists() and f.read_text() for f in files), 60)
    parent.send_signal(number)
    parent.wait(30)
    assert _eventually(lambda: not any(_alive(int(f.read_text())) for f in files), 10)


def test_a_launcher_is_recognised_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in sum(LAUNCHERS, ()):
        monkeypatch.delenv(name, raising=False)
    assert not under_launcher()
    monkeypatch.setenv("SLURM_PROCID", "0")  # a batch script, not a step of srun
    assert not under_launcher()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert under_launcher()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not under_launcher()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert under_launcher()


def test_mpi_is_used_under_mpirun_where_mpi4py_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in sum(LAUNCHERS, ()):
        monkeypatch.delenv(name, raising=False)
    installed = find_spec("mpi4py") is not None
    for launcher, uses_mpi in (("OMPI_COMM_WORLD", installed), ("PMI", installed), ("", False)):
        with monkeypatch.context() as patch:
            prefix = f"{launcher}_" if launcher else ""
            patch.setenv(f"{prefix}RANK", "0")
            patch.setenv(f"{prefix}SIZE" if launcher else "WORLD_SIZE", "2")
            assert under_launcher() and _has_mpi() == uses_mpi
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr("shardwise.launch.launchers.find_spec", lambda name: None)
    assert under_launcher() and not _has_mpi()


SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1"}
PER_HOST = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("variables", "local_world", "one_host"),
    [
        (SLURM, None, False),
        (SLURM | {"SLURM_STEP_NUM_NODES": "4"}, None, False),
        (SLURM | {"SLURM_NNODES": "1"}, None, True),
        (SLURM | PER_HOST | {"SLURM_STEP_NUM_NODES": "4"}, 2, False),
        (SLURM | PER_HOST | {"SLURM_NODEID": "3"}, 1, False),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}, 7, True),
        (SLURM | {"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "0"}, None, False),  # the job's
        (SLURM | {"SLURM_NTASKS_PER_NODE": "7", "SLURM_STEP_NUM_NODES": "2"}, 7, False),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "7"}, 7, True),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "a lot", "SLURM_NODEID": "0"}, None, False),
        ({"PMI_RANK": "5", "PMI_SIZE": "7"} | PER_HOST, 2, False),
        ({"PMI_RANK": "5", "PMI_SIZE": "7", "MPI_LOCALNRANKS": "7"} | PER_HOST, 7, True),
        ({"RANK": "5", "WORLD_SIZE": "7"}, None, False),
        ({"RANK": "5", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "7"}, 7, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None, True),
    ],
)
def test_workers_of_several_hosts_are_not_taken_for_those_of_one(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    local_world: int | None,
    one_host: bool,
) -> None:
    for name in (*sum(LAUNCHERS, ()), *SLURM_HOSTS, *SLURM_PER_HOST, "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launched = _launched()
    assert launched is not None
    assert (launched.local_world, launched.one_host) == (local_world, one_host)
    if one_host:
        _check_address(launched)
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    else:
        with pytest.raises(ShardwiseError, match="MASTER_ADDR is not set"):
            _check_address(launched)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _eventually(condition, seconds: float) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _begin_again(folder: str) -> list[float]:
    """Sums of a lane, before and after the process group was ended and made anew."""
    rank, found = dist.get_rank(), []
    for number in range(2):
        dist.destroy_process_group()
        place = f"file://{folder}/{number}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
        lane, x = Communicator().in_lane("gradients"), torch.ones(3)
        lane.prepare([(0, 1)])
        lane.all_reduce((0, 1), x).wait()
        found.append(float(x.sum()))
    return found


def test_groups_end_with_the_process_group_they_belong_to(tmp_path: Path) -> None:
    assert run_local(_begin_again, 2, str(tmp_path)) == [[6.0, 6.0], [6.0, 6.0]]
