"""What this process has of the present world; it ends with torch's process group.

Every group of gloo has threads that wake a hundred times a second even when it is idle, so the same
ranks never get a second group of the same lane, unless they belong to communicators of other ranks:
who makes a group must know that all others who make it have none.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.alarm import Alarm
from shardwise.comm.headers import header, lane_number
from shardwise.comm.wires import Members, Wires

SETTLING = 0.2  # seconds
NOBODY_SENDS = 0x7FFFFFF0  # a tag
_NOTHING = torch.zeros(1, dtype=torch.uint8)
GroupKey = tuple[str, str, Members, Members]  # lane, backend, a communicator's ranks, some of these


class WorldState:
    """Process groups, connections, the alarm, and how many messages have gone each way."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.groups: dict[GroupKey, Any] = {}  # as far as they are made
        self.others: list[Any] = []  # groups that somebody else has made
        self.alarm = Alarm(self._wake_groups, _default_store)
        self.wires = Wires(self.alarm)
        self.phase = ""  # what this process is doing
        self._numbers: dict[tuple[object, str, bool], int] = {}

    def header(
        self, whom: object, lane: str, outgoing: bool, nbytes: int, follows: bool, text: bytes
    ) -> bytes:
        """Of the next message to or from a rank, or of a group of ranks."""
        key = whom, lane, outgoing
        self._numbers[key] = number = (self._numbers.get(key, 0) + 1) & 0xFFFFFFFF
        return header(follows, lane_number(lane), number, nbytes, text)

    def _wake_groups(self) -> None:
        """Ends all waits of this process inside gloo, and all that are tried later, with an error.

        Gloo has no call for that, but it closes all connections of a group when one of its waits
        takes too long: so one waits a millisecond for a message that nobody sends.
        """
        everything: list[Any] = [dist.group.WORLD, *self.groups.values(), *self.others]
        for group in everything:
            with suppress(Exception):  # not a member, closed already, or another backend
                if backend_of(group) == "gloo":
                    place = dist.get_rank(group)
                    peer = (place + 1) % dist.get_world_size(group)
                    group.recv([_NOTHING], peer, NOBODY_SENDS).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self.alarm.close()
        self.wires.close()


_state: WorldState | None = None


def world_state() -> WorldState:
    """That of the present world: the connections of one that has ended are closed."""
    global _state
    if _state is None or _state.world is not dist.group.WORLD:
        if _state is not None:
            _state.close()
        _state = WorldState()
    return _state


@atexit.register
def _settle() -> None:
    """Leaves gloo's threads a moment while Python is there.

    They let go of a tensor after whoever waited for it goes on; one that does so as Python ends
    aborts the process, after all was done: of scripts in plain torch, 4 of 16.
    """
    if _state is not None:
        time.sleep(SETTLING)


def backend_of(group: Any) -> str:
    """What moves a group's tensors; of one that has a backend per device, that of GPUs if any."""
    name = dist.get_backend(group)
    if name != "undefined" and ":" not in name:
        return name
    pairs = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    return pairs["cuda"] if "cuda" in pairs and torch.cuda.is_available() else pairs["cpu"]


def _default_store() -> Any:
    """The store of torch's process group, where this torch gives it away."""
    with suppress(AttributeError, RuntimeError, ValueError):
        return dist.distributed_c10d._get_default_store()
    return None
