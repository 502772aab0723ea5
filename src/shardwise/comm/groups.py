"""The process groups of this process: made once, kept until the world ends.

Every group of gloo has threads that wake a hundred times a second even when it is idle, so the same
ranks never get a second group of the same lane.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Members = tuple[int, ...]  # global ranks

NOBODY_SENDS = 0x7FFFFFF0  # a tag
_NOTHING = torch.zeros(1, dtype=torch.uint8)

_world: Any = None  # whose groups these are
_groups: dict[tuple[str, Members], Any] = {}


def backend_of(group: Any) -> str:
    """What moves a group's tensors; of one that has a backend per device, that of GPUs if any."""
    name = dist.get_backend(group)
    if name != "undefined" and ":" not in name:
        return name
    pairs = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    return pairs["cuda"] if "cuda" in pairs and torch.cuda.is_available() else pairs["cpu"]


def group_of(lane: str, members: Members, timeout: float, backend: str | None = None) -> Any:
    """The group of these members in a lane; the first time, all ranks of the world make it."""
    if not known_group(lane, members):
        limit = timedelta(seconds=timeout)
        _groups[lane, members] = dist.new_group(list(members), timeout=limit, backend=backend)
    return _groups[lane, members]


def known_group(lane: str, members: Members) -> Any:
    """The group of these members, if it has been made."""
    global _world
    if _world is not dist.group.WORLD:  # destroyed, and started again: its groups went with it
        _groups.clear()
        _world = dist.group.WORLD
    return _groups.get((lane, members))


def wake_groups(others: Iterable[Any] = ()) -> None:
    """Ends all waits of this process inside gloo, and all that are tried later, with an error.

    Gloo has no call for that, but it closes all connections of a group when one of its waits takes
    too long: so one waits a millisecond for a message that nobody sends.
    """
    everything: list[Any] = [dist.group.WORLD, *_groups.values(), *others]
    for group in everything:
        with suppress(Exception):  # not a member, closed already, or another backend
            if backend_of(group) == "gloo":
                place = dist.get_rank(group)
                peer = (place + 1) % dist.get_world_size(group)
                group.recv([_NOTHING], peer, NOBODY_SENDS).wait(timedelta(milliseconds=1))
