"""A pool of worker processes, started once and used by all tests.

Starting ranks per test is what makes such suites slow, so there is one pool per world size.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 300.0  # seconds without an answer before the pool is given up
GRACE = 5.0  # seconds that the other ranks have after one failed
MOST_GROUPS = 24  # that a rank keeps for later jobs: the idle threads of each cost time


def _worker(rank: int, size: int, port: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.comm.world_state import world_state

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT / 2)
    )
    connection.send(("ready", None))
    while (job := connection.recv()) is not None:
        function, args = job
        try:
            result = function(*args)
            kind = (
                "last result" if world_state().alarm.sentence else "result"
            )  # the world has failed
            connection.send((kind, result))
        except BaseException:
            connection.send(("error", f"rank {rank}:\n{traceback.format_exc()}"))
        groups = world_state().groups
        everybody = tuple(range(size))
        if sum(of_all == everybody for _, _, of_all, _ in groups) > MOST_GROUPS:  # as many on all
            dist.barrier()  # nothing is under way any more
            for group in groups.values():
                with suppress(ValueError):  # this rank is not a member
                    dist.destroy_process_group(group)
            groups.clear()
            gc.collect()
    dist.destroy_process_group()


class WorkerPool:
    """Runs functions on all its processes and returns every rank's result."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "shardwise"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._connections, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
        self.broken = False
        self._collect()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on every rank."""
        for connection in self._connections:
            connection.send((function, args))
        return self._collect()

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while waiting := {c: r for r, c in enumerate(self._connections) if r not in results}:
            ready = wait(list(waiting), timeout=GRACE if errors else TIMEOUT)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    kind, results[rank] = connection.recv()
                    self.broken |= kind == "last result"
                except EOFError:
                    self._processes[rank].join(GRACE)
                    code = self._processes[rank].exitcode
                    kind, results[rank] = "error", f"rank {rank} died with exit code {code}"
                if kind == "error":
                    errors[rank] = results[rank]
            if not ready:
                self.stop()  # ranks may wait for ever for those that failed
                silent = f"ranks {sorted(waiting.values())} do not answer"
                raise AssertionError("\n".join([*errors.values(), silent]))
        if errors or self.broken:
            self.stop()
        if errors:
            raise AssertionError("\n".join(errors.values()))
        return [results[rank] for rank in range(len(results))]

    def stop(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


_pools: dict[int, WorkerPool] = {}


def shared_pool(world: int) -> WorkerPool:
    """The pool of this many ranks, made anew after a failure broke it."""
    if world not in _pools or _pools[world].broken:
        _pools[world] = WorkerPool(world)
    return _pools[world]
