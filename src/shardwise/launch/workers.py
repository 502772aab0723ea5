"""Workers as local processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import LostPeer, ShardwiseError, WorkerError

HOST = "127.0.0.1"
GRACE = 3.0  # seconds a worker gets to end before it is killed
CAUSE = 0.5  # seconds in which the rank that failed first may report after another
CAUSES = ("dead", "sentence")  # what workers report when they are the first to fail
EFFECTS = ("traceback", "lost")  # perhaps because another has failed
KINDS = (*CAUSES, *EFFECTS, "result")


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
            workers.append(_start(rank, world, store.port, timeout))
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
class _Worker:
    process: BaseProcess
    connection: Connection


def _start(*group: Any) -> _Worker:
    """Starts a worker, which joins its group by rank, world, port and timeout."""
    # A fork server imports torch once for all workers, which takes seconds.
    known = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in known else "spawn")
    if "forkserver" in known:
        context.set_forkserver_preload(["torch.distributed", "shardwise.training.trainer"])
    mine, theirs = context.Pipe()
    # A worker starts where the fork server started, and this program may have moved since.
    process = context.Process(target=_work, args=(theirs, os.getcwd(), *group))
    process.start()
    theirs.close()
    return _Worker(process, mine)


def _work(connection: Connection, folder: str, *group: Any) -> None:
    """What a worker process does: joins the others, runs the function, reports, waits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        os.chdir(folder)
        with warnings.catch_warnings():  # torch warns about the tree specs that it pickles itself
            warnings.simplefilter("ignore", FutureWarning)
            function, args = connection.recv()
        _join_group(*group)
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


def _join_group(rank: int, world: int, port: int, timeout: float) -> None:
    torch.set_num_threads(max(1, num_cores() // world))
    if sys.platform == "linux":  # not the network card: its address may be unknown or filtered
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    seconds = timedelta(seconds=timeout)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=seconds)


def num_cores() -> int:
    """The cores this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def _collect(workers: list[_Worker]) -> list[Any]:
    """Every rank's result in rank order; raises when one has failed."""
    ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    reports: dict[int, tuple[str, Any]] = {}
    end = inf
    while len(reports) < len(workers) and not any(kind in CAUSES for kind, _ in reports.values()):
        pending = [connection for connection, rank in ranks.items() if rank not in reports]
        left = max(end - time.monotonic(), 0.0)
        if not (ready := wait(pending, None if left == inf else left)):
            break
        reports |= {ranks[connection]: _report(connection) for connection in ready}  # type: ignore
        if any(kind in EFFECTS for kind, _ in reports.values()):
            end = min(end, time.monotonic() + CAUSE)
    failed = {rank: report for rank, report in reports.items() if report[0] != "result"}
    if failed:
        raise _failure(workers, failed)
    return [reports[rank][1] for rank in range(len(workers))]


def _report(connection: Connection) -> tuple[str, Any]:
    """What a worker says about itself, or that it can say nothing any more."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return "dead", ""


def _failure(workers: list[_Worker], failed: dict[int, tuple[str, str]]) -> Exception:
    """The cause, where several have failed: a rank that dies or fails makes the others fail."""
    rank, (kind, value) = min(failed.items(), key=lambda item: KINDS.index(item[1][0]))
    if kind == "dead":
        death = _death(workers, rank)
        told = [said for other, said in failed.values() if other == "lost"]
        return WorkerError(f"{death}; {told[0]}") if told else death
    if kind == "sentence":
        return ShardwiseError(value)
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
