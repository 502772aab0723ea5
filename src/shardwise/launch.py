"""Starting workers: local processes of this machine, or those that a launcher has started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from math import prod
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import LostPeer
from shardwise.errors import ShardwiseError

HOST = "127.0.0.1"
DEFAULT_WORLD = 2
GRACE = 3.0  # seconds a worker gets to end before it is killed

# How launchers name rank, world size, rank on this host, and ranks on this host. Slurm's batch
# script has a SLURM_PROCID too, but only a step started by srun has the number of its tasks.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


class WorkerError(RuntimeError):
    """A worker that failed or died, with its traceback where there is one."""


# -- local workers ---------------------------------------------------------------------------------


def run_local(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 1800.0
) -> list[Any]:
    """Runs function(*args) on `world` local processes and returns every rank's result.

    The function must be importable (no lambda). `timeout` is how many seconds a rank waits for
    another's message. One worker is this process itself.

    >>> run_local(sum, 2, [1, 2])
    [3, 3]
    """
    if world < 1:
        raise ShardwiseError(f"{world} workers: there must be at least 1")
    if world == 1:
        return [function(*args)]
    # This process holds the meeting point, so that no free port can be lost to somebody else.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    workers: list[_Worker] = []
    try:
        for rank in range(world):
            workers.append(_start(_Setup(rank, world, store.port, timeout, os.getcwd())))
        for worker in workers:
            with suppress(ConnectionError):  # it died; `_collect` says how
                worker.connection.send((function, args))
        with _passing_on_sigterm(workers):
            results = _collect(workers)
        for worker in workers:  # nobody leaves while another may still read from it
            with suppress(ConnectionError):
                worker.connection.send("end")
        for worker in workers:
            worker.process.join(GRACE)
        return results
    finally:
        _stop(workers)


@dataclass(frozen=True)
class _Setup:
    rank: int
    world: int
    port: int
    timeout: float
    folder: str  # a worker starts where this program started, which may have moved since


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection


def _start(setup: _Setup) -> _Worker:
    # A fork server imports torch once for all workers, which takes seconds.
    known = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in known else "spawn")
    if "forkserver" in known:
        context.set_forkserver_preload(["torch", "torch.distributed", "shardwise"])
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(setup, theirs))
    process.start()
    theirs.close()
    return _Worker(process, mine)


def _work(setup: _Setup, connection: Connection) -> None:
    """What a worker process does: joins the others, runs the function, reports, waits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        os.chdir(setup.folder)
        with warnings.catch_warnings():  # torch warns about the tree specs that it pickles itself
            warnings.simplefilter("ignore", FutureWarning)
            function, args = connection.recv()
        _join_group(setup)
        connection.send(("result", function(*args)))
    except LostPeer as error:
        connection.send(("lost", str(error)))
    except ShardwiseError as error:
        connection.send(("sentence", str(error)))
    except BaseException:
        connection.send(("traceback", traceback.format_exc()))
    connection.recv()  # after an error too: leaving now would make the other ranks fail as well
    dist.destroy_process_group()


def _follow_parent() -> None:
    """Ends this process when its parent is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join_group(setup: _Setup) -> None:
    torch.set_num_threads(max(1, _num_cores() // setup.world))
    if sys.platform == "linux":  # not the network card: its address may be unknown or filtered
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    seconds = timedelta(seconds=setup.timeout)
    store = dist.TCPStore(HOST, setup.port, is_master=False, timeout=seconds)
    dist.init_process_group(
        "gloo", store=store, rank=setup.rank, world_size=setup.world, timeout=seconds
    )


def _num_cores() -> int:
    """The cores this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def _collect(workers: list[_Worker]) -> list[Any]:
    """Every rank's result in rank order; raises at the first failure."""
    ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        pending = [connection for connection, rank in ranks.items() if rank not in results]
        for connection in wait(pending):
            assert isinstance(connection, Connection)
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionError):
                raise _death(workers, ranks[connection]) from None
            if kind == "result":
                results[ranks[connection]] = value
            else:
                raise _failure(workers, ranks[connection], kind, value)
    return [results[rank] for rank in range(len(workers))]


def _failure(workers: list[_Worker], rank: int, kind: str, value: str) -> Exception:
    if kind == "sentence":
        return ShardwiseError(value)
    # A rank that dies makes the others fail, and one of these may report first.
    if wait([worker.process.sentinel for worker in workers], timeout=0.5):
        dead = next(r for r, worker in enumerate(workers) if not worker.process.is_alive())
        death = _death(workers, dead)
        return WorkerError(f"{death}; {value}") if kind == "lost" else death
    if kind == "lost":
        return WorkerError(value)
    return WorkerError(f"worker {rank} of {len(workers)} failed:\n{value}")


def _death(workers: list[_Worker], rank: int) -> WorkerError:
    process = workers[rank].process
    process.join(GRACE)
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return WorkerError(f"worker {rank} of {len(workers)} {how}; the others were ended")


@contextmanager
def _passing_on_sigterm(workers: list[_Worker]) -> Iterator[None]:
    """Within, SIGTERM to this process goes to the workers, who may end in their own way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(*_: object) -> None:
        for worker in workers:
            worker.process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(workers: list[_Worker]) -> None:
    """Ends whatever still runs, so that nothing is left behind; a worker may not heed SIGTERM."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()


# -- workers of a launcher -------------------------------------------------------------------------


def under_launcher() -> bool:
    """Whether torchrun, mpirun or srun has started this process as one of its workers."""
    return _launched() is not None


def launched_world() -> int | None:
    """How many workers a launcher has started; None without a launcher."""
    launched = _launched()
    return launched[1] if launched else None


def launched_switches(world: int) -> tuple[int, ...]:
    """The switch of every rank, where `shardwise emulate` says so; else they share one."""
    text = os.environ.get("SHARDWISE_PER_SWITCH", "")
    per_switch = int(text) if text.isdigit() and int(text) else world
    return tuple(rank // per_switch for rank in range(world))


def choose_world(asked: int | None = None, split: Mapping[str, int] | None = None) -> int:
    """How many workers to use: as asked for, as launched, as a split needs, or else 2."""
    needed = prod(split.values()) if split else None
    world = next(n for n in (asked, launched_world(), needed, DEFAULT_WORLD) if n is not None)
    if world < 1:
        raise ShardwiseError(f"{world} workers: there must be at least 1")
    if launched_world() not in (None, world):
        raise ShardwiseError(f"{world} workers are asked for, and {launched_world()} are running")
    if split and needed is not None and needed > world:
        text = ",".join(f"{axis}={degree}" for axis, degree in split.items())
        raise ShardwiseError(f"split {text} needs {needed} workers, and there are {world}")
    return world


def init_from_environment(timeout: float = 1800.0, backend: str | None = None) -> torch.device:
    """Joins the workers that a launcher has started; returns the device of this one.

    The backend is NCCL where every worker of this host has a GPU of its own, MPI where mpirun has
    started them and mpi4py is installed, else gloo.
    """
    launched = _launched()
    if launched is None:
        raise ShardwiseError("no launcher has started this process; use torchrun, mpirun or srun")
    rank, world, local_rank, local_world = launched
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    backend = backend or ("nccl" if gpu else "mpi4py" if _has_mpi() else "gloo")
    if backend == "mpi4py":
        _join_mpi(launched, timeout)
        return torch.device("cpu")
    if local_world == world:  # one host
        os.environ.setdefault("MASTER_ADDR", HOST)
        os.environ.setdefault("MASTER_PORT", "29500")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ShardwiseError(f"{name} is not set; give the address and port of rank 0's host")
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    limit = timedelta(seconds=timeout)
    store = _meeting_point(rank, world, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    return torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")


def _meeting_point(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Where ranks leave their addresses: apart for every restart of an elastic launcher, whose
    store still has the addresses of ranks that are dead."""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))  # type: ignore
    return dist.PrefixStore(f"start-{num_restarts()}", store)


def num_restarts() -> int:
    """How often an elastic launcher has started these workers anew."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0


def _join_mpi(launched: tuple[int, int, int, int], timeout: float) -> None:
    rank, world, _, local_world = launched
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _num_cores() // local_world))
    try:
        from shardwise.comm import mpi  # starts MPI
    except (ImportError, RuntimeError) as error:
        raise ShardwiseError(
            f"mpi4py cannot be used ({str(error).splitlines()[0]}); install an MPI library, as "
            "pip install mpich does, or uninstall mpi4py"
        ) from error
    mpi.join(rank, world, timeout)


def end_all(code: int) -> None:
    """Ends this process with an exit code; the other workers of mpirun too, which wait for it."""
    if dist.is_initialized() and dist.get_backend() == "mpi4py":
        from shardwise.comm import mpi

        mpi.abort(code)
    sys.exit(code)


def _has_mpi() -> bool:
    """Whether mpirun has started this process, and mpi4py is there to use it."""
    names = _launcher()
    by_mpirun = names is not None and names[0].startswith(("OMPI_", "PMI_"))
    return by_mpirun and find_spec("mpi4py") is not None


def _launcher() -> tuple[str, str, str, str] | None:
    """The names of the variables that a launcher has set."""
    for names in LAUNCHERS:
        rank, world = os.environ.get(names[0], ""), os.environ.get(names[1], "")
        if rank.isdigit() and world.isdigit() and (names[0] == "RANK" or int(world) > 1):
            return names
    return None


def _launched() -> tuple[int, int, int, int] | None:
    """Rank, world size, local rank and local world size as a launcher has set them."""
    names = _launcher()
    if names is None:
        return None
    rank, world, local_rank, local_world = (os.environ.get(name, "") for name in names)
    return int(rank), int(world), int(local_rank or rank), int(local_world or world)
