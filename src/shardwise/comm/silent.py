"""One rank of many whose messages are not sent: how long it computes, without all others.

What it computes is wrong, and every rank may run by itself, on one device after the other: the sum
of their times beside that of one worker says what splitting costs, and a step cannot be faster.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm.communicator import Communicator, Messages
from shardwise.comm.pending import AGREEMENT, ANYTHING, About, Pending
from shardwise.comm.timeline import Timeline


class Silent(Communicator):
    """Zeros arrive from others, sums are this rank's part, and all others agree."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.lane, self.backend = rank, size, "", "silent"
        self.timeout, self.group, self.timeline = None, None, Timeline()
        self._global = tuple(range(size))

    def _exchange(
        self, sends: Messages, receives: Messages, about: About, action: str, ranks: tuple[int, ...]
    ) -> Pending:
        for _, buffer in receives:
            buffer.zero_()
        return Pending([])

    def _directly(self, ranks: tuple[int, ...]) -> bool:
        return True

    def all_gather(
        self, ranks: tuple[int, ...], parts: list[torch.Tensor], x: Any, about: About = ANYTHING
    ) -> Pending:
        for part in parts:
            part.copy_(x)
        return Pending([])

    def reduce_scatter(
        self, ranks: tuple[int, ...], y: Any, parts: list[torch.Tensor], about: About = ANYTHING
    ) -> Pending:
        y.copy_(parts[ranks.index(self.rank)])
        return Pending([])

    def all_reduce(
        self,
        ranks: tuple[int, ...],
        x: torch.Tensor,
        about: About = ANYTHING,
        algorithm: Any = None,
    ) -> Pending:
        return Pending([])

    def broadcast(self, x: torch.Tensor, root: int = 0) -> Pending:
        return Pending([])

    def gather_objects(self, value: Any, about: About = AGREEMENT) -> list[Any]:
        return [value] * self.size

    def abort(self, reason: str) -> None:
        """Nobody hears it."""

    def prepare(self, groups: Any) -> None:
        """Nobody is there to make process groups with."""

    def group_of_lane(self, lane: str) -> Any:
        return None

    def summing_as(self, cluster: Any) -> Silent:
        return self
