"""Workers that torchrun, mpirun or srun has started: how many there are, and how they meet."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.launch.workers import HOST, num_cores, run_local

DEFAULT_WORLD = 2

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
# How srun says on how many hosts a step runs, and how many workers each of them has; those of the
# job come last, as a step may be smaller.
SLURM_HOSTS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
SLURM_PER_HOST = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def under_launcher() -> bool:
    """Whether torchrun, mpirun or srun has started this process as one of its workers."""
    return _launched() is not None


def launched_world() -> int | None:
    """How many workers a launcher has started; None without a launcher."""
    launched = _launched()
    return launched.world if launched else None


def launched_switches(world: int) -> tuple[int, ...]:
    """The switch of every rank, where `shardwise emulate` says so; else they share one."""
    text = os.environ.get("SHARDWISE_PER_SWITCH", "")
    per_switch = int(text) if text.isdigit() and int(text) else world
    return tuple(rank // per_switch for rank in range(world))


def choose_world(asked: int | None = None, needed: int | None = None) -> int:
    """How many workers to use: as asked for, as launched, as a plan needs, or else 2."""
    world = next(n for n in (asked, launched_world(), needed, DEFAULT_WORLD) if n is not None)
    if world < 1:
        raise ShardwiseError(f"{world} workers: there must be at least 1")
    if launched_world() not in (None, world):
        raise ShardwiseError(f"{world} workers are asked for, and {launched_world()} are running")
    return world


def init_from_environment(timeout: float = 1800.0, backend: str | None = None) -> torch.device:
    """Joins the workers that a launcher has started; returns the device of this one.

    The backend is NCCL where every worker of this host has a GPU of its own, MPI where mpirun has
    started them and mpi4py is installed, else gloo.
    """
    launched = _launched()
    if launched is None:
        raise ShardwiseError("no launcher has started this process; use torchrun, mpirun or srun")
    local_world = launched.local_world or launched.world
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = num_gpus >= local_world
    few = f"{num_gpus} GPUs are on this host, and {local_world} workers"
    if backend == "nccl" and not enough:
        raise ShardwiseError(f"{few}: NCCL needs one for each; start {num_gpus}, or take gloo")
    if backend is None and 0 < num_gpus < local_world:
        warnings.warn(f"{few}: they compute on its CPUs, without the GPUs", stacklevel=2)
    backend = backend or ("nccl" if enough else "mpi4py" if _has_mpi() else "gloo")
    if backend == "mpi4py":
        _join_mpi(launched, timeout)
        return torch.device("cpu")
    _check_address(launched)
    rank, world, local_rank = launched.rank, launched.world, launched.local_rank
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    limit = timedelta(seconds=timeout)
    store = _meeting_point(rank, world, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    return torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")


def run_on_workers(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 1800.0,
    backend: str | None = None,
) -> Any:
    """What rank 0 returns, of local workers or of those of a launcher; there, None on the others.

    >>> run_on_workers(sum, 2, [1, 2])
    3
    """
    if not under_launcher():
        return run_local(function, world, *args, timeout=timeout)[0]
    init_from_environment(timeout, backend)
    found, first = function(*args), dist.get_rank() == 0
    dist.destroy_process_group()
    return found if first else None


def _meeting_point(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Where ranks leave their addresses: apart for every restart of an elastic launcher, whose
    store still has the addresses of ranks that are dead."""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))  # type: ignore
    return dist.PrefixStore(f"start-{num_restarts()}", store)


def num_restarts() -> int:
    """How often an elastic launcher has started these workers anew."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0


def _check_address(launched: Launched) -> None:
    """Where all ranks are known to be on this host, it is where they meet; else somebody says."""
    if launched.one_host:
        os.environ.setdefault("MASTER_ADDR", HOST)
        os.environ.setdefault("MASTER_PORT", "29500")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ShardwiseError(f"{name} is not set; give the address and port of rank 0's host")


def _join_mpi(launched: Launched, timeout: float) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // (launched.local_world or launched.world)))
    try:
        from shardwise.comm import mpi  # starts MPI
    except (ImportError, RuntimeError) as error:
        raise ShardwiseError(
            f"mpi4py cannot be used ({str(error).splitlines()[0]}); install an MPI library, as "
            "pip install mpich does, or uninstall mpi4py"
        ) from error
    mpi.join(launched.rank, launched.world, timeout)


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


@dataclass(frozen=True)
class Launched:
    """What a launcher says about this process and the others."""

    rank: int
    world: int
    local_rank: int
    local_world: int | None  # workers of this host, where it says so
    one_host: bool  # all of them, for sure


def _launched() -> Launched | None:
    """As the variables of a launcher say it."""
    names = _launcher()
    if names is None:
        return None
    rank, world, local_rank, local_world = (os.environ.get(name, "") for name in names)
    local, one_host = int(local_world) if local_world.isdigit() else None, local_world == world
    if names[0] == "SLURM_PROCID" or (names[0] == "PMI_RANK" and local is None):  # both are srun's
        local, one_host = _slurm_hosts(int(world), local)
    return Launched(int(rank), int(world), int(local_rank or rank), local, one_host or world == "1")


def _slurm_hosts(world: int, most: int | None) -> tuple[int | None, bool]:
    """How many workers this host has, and whether these are all; `most` is what was asked for."""
    per_host, node = _slurm_per_host(), os.environ.get("SLURM_NODEID", "")
    known = sum(per_host) == world and node.isdigit() and int(node) < len(per_host)
    local = per_host[int(node)] if known else most
    hosts = (os.environ.get(name, "") for name in SLURM_HOSTS)
    num_hosts = next((int(text) for text in hosts if text.isdigit()), None)
    return local, local == world if num_hosts is None else num_hosts == 1


def _slurm_per_host() -> list[int]:
    """How many workers every host has, of Slurm's "2(x3),1"; nothing where it does not say."""
    text = next((os.environ[name] for name in SLURM_PER_HOST if name in os.environ), "")
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found
