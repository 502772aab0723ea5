"""A communicator that notes what it sends, for tests of what strategies declare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.cluster.measured_sums import Algorithm
from shardwise.comm import ANYTHING, About, Communicator, Pending
from shardwise.comm.communicator import Messages


@dataclass(frozen=True)
class Sent:
    """One message that left this rank, or this rank's share of a sum."""

    kind: str  # "message" or "sum"
    peers: tuple[int, ...]
    bytes: int


class Recording(Communicator):
    """Sends like a Communicator and keeps a list of what left this rank."""

    def __init__(self, group: Any = None) -> None:
        super().__init__(group)
        self.sent: list[Sent] = []

    def _note(self, peer: int, tensor: torch.Tensor) -> None:
        if peer != self.rank:
            self.sent.append(Sent("message", (peer,), tensor.numel() * tensor.element_size()))

    def exchange(self, sends: Messages, receives: Messages, about: About = ANYTHING) -> Pending:
        for peer, tensor in sends:
            self._note(peer, tensor)
        return super().exchange(sends, receives, about)

    def all_gather(
        self, ranks: tuple[int, ...], parts: list[torch.Tensor], x: Any, about: About = ANYTHING
    ) -> Pending:
        for peer in ranks if about.kind != "agreement" else ():  # no layer declares those
            self._note(peer, x)
        return super().all_gather(ranks, parts, x, about)

    def reduce_scatter(
        self, ranks: tuple[int, ...], y: Any, parts: list[torch.Tensor], about: About = ANYTHING
    ) -> Pending:
        for peer, part in zip(ranks, parts, strict=True):
            self._note(peer, part)
        return super().reduce_scatter(ranks, y, parts, about)

    def all_to_all(
        self,
        ranks: tuple[int, ...],
        receives: list[torch.Tensor],
        sends: list[torch.Tensor],
        about: About = ANYTHING,
    ) -> Pending:
        for peer, tensor in zip(ranks, sends, strict=True):
            self._note(peer, tensor)
        return super().all_to_all(ranks, receives, sends, about)

    def all_reduce(
        self,
        ranks: tuple[int, ...],
        x: torch.Tensor,
        about: About = ANYTHING,
        algorithm: Algorithm | None = None,
    ) -> Pending:
        if len(ranks) > 1:
            self.sent.append(Sent("sum", ranks, x.numel() * x.element_size()))
        return super().all_reduce(ranks, x, about, algorithm)
