"""What this process has of the present world; it ends with torch's process group."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shardwise.comm.alarm import Alarm
from shardwise.comm.groups import wake_groups
from shardwise.comm.headers import header, lane_number
from shardwise.comm.wires import Wires


class WorldState:
    """Connections, the alarm, and how many messages have gone each way."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.groups: list[Any] = []  # of torch's, that somebody else has made
        self.alarm = Alarm(lambda: wake_groups(self.groups), _default_store)
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


def _default_store() -> Any:
    """The store of torch's process group, where this torch gives it away."""
    with suppress(AttributeError, RuntimeError, ValueError):
        return dist.distributed_c10d._get_default_store()
    return None
