"""The process groups of this process: made once, kept until dropped or until the world ends.

Every group of gloo has threads that wake a hundred times a second even when it is idle, so the same
ranks never get a second group of the same lane.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Members = tuple[int, ...]  # global ranks

_world: Any = None  # whose groups these are
_groups: dict[tuple[str, Members], Any] = {}


def group_of(lane: str, members: Members, timeout: float | None, backend: str | None = None) -> Any:
    """The group of these members in a lane; the first time, all ranks of the world make it."""
    global _world
    if _world is not dist.group.WORLD:  # destroyed, and started again: its groups went with it
        _groups.clear()
        _world = dist.group.WORLD
    if (lane, members) not in _groups:
        limit = timedelta(seconds=timeout) if timeout else None
        _groups[lane, members] = dist.new_group(list(members), timeout=limit, backend=backend)
    return _groups[lane, members]


def known_group(lane: str, members: Members) -> Any:
    """The group of these members that has been made."""
    return _groups[lane, members]


def num_groups() -> int:
    """How many are kept: the same number on every rank."""
    return len(_groups)


def drop_groups() -> None:
    """Ends all of them; every rank calls it, when nothing is under way."""
    for group in _groups.values():
        with suppress(ValueError):  # this rank is not a member
            dist.destroy_process_group(group)
    _groups.clear()
