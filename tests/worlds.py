"""Many worlds that fail, one after the other, in the same worker processes.

A world that has failed is over; starting processes for each would take most of a test's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardwise import run_local
from shardwise.comm import connecting

Case = tuple[Any, ...]


def run_cases(function: Callable[..., Any], world: int, cases: Sequence[Case]) -> list[list[Any]]:
    """What function(*case) returns on every rank, for each case in a world of its own."""
    ranks = run_local(_in_fresh_worlds, world, function, list(cases), timeout=60.0)
    return [list(results) for results in zip(*ranks, strict=True)]


def _in_fresh_worlds(function: Callable[..., Any], cases: list[Case]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    store, results = dist.distributed_c10d._get_default_store(), []
    _wait_for_all(store, "begun", size)
    for number, case in enumerate(cases):
        dist.destroy_process_group()
        own = dist.PrefixStore(f"world {number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        results.append(function(*case))
        _wait_for_all(store, f"done {number}", size)
    return results


def _wait_for_all(store: dist.Store, what: str, size: int) -> None:
    """Nobody leaves a world while another is still on the way into it, or needs it."""
    store.add(what, 1)
    while store.add(what, 0) < size:
        time.sleep(0.01)


def reachable(reach: bool) -> AbstractContextManager[Any]:
    """Within, ranks can connect with each other, or cannot."""
    if reach:
        return nullcontext()
    return mock.patch.object(connecting, "_offer", lambda listener: None)
