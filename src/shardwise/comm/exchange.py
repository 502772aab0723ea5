"""Carrying out a transfer: this rank's part of it, over a communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardwise.comm import ANYTHING, About, Communicator, Pending
from shardwise.geometry.transfer import Route, Transfer
from shardwise.tensors import Wait, filling, memory_format_of


@dataclass(frozen=True)
class Delivery:
    """One rank's part in a transfer, with all that is known of it before it begins."""

    route: Route
    fill: float
    adds: bool
    about: About

    @classmethod
    def of(cls, transfer: Transfer, rank: int, about: About = ANYTHING) -> Delivery:
        return cls(transfer.route(rank), transfer.fill, transfer.adds, about)

    def begin(self, x: torch.Tensor, comm: Communicator) -> Wait:
        """Begins with this rank's part; the result waits for what it becomes."""
        if self.route.kind == "identity":
            return lambda: x
        if comm.timeline.on:
            return self._recorded(x, comm)
        return self._start(x, comm)

    def received(self, y: torch.Tensor) -> list[torch.Tensor]:
        """Copies of what of the result others have sent; of a sum, all of it."""
        if self.route.kind in ("identity", "local"):
            return []
        return [y] if self.adds else [y[piece.slices].clone() for piece in self.route.receives]

    def again(self, x: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result once more, from the same part and what was received: no message is sent."""
        if self.route.kind == "identity":
            return x
        if self.route.kind == "local":
            return self._own_part(x)
        return received[0] if self.adds else self._put(self._begun(x), received)

    def _recorded(self, x: torch.Tensor, comm: Communicator) -> Wait:
        before = comm.timeline.switch(f"{self.about.name} packed", "copy")
        wait = self._start(x, comm)
        comm.timeline.switch(*before)

        def unpacked() -> torch.Tensor:
            before = comm.timeline.switch(f"{self.about.name} unpacked", "copy")
            y = wait()
            comm.timeline.switch(*before)
            return y

        return unpacked

    def _start(self, x: torch.Tensor, comm: Communicator) -> Wait:
        route, kind, about = self.route, self.route.kind, self.about
        if kind == "local":
            y = self._own_part(x)
            return lambda: y
        if kind == "all_reduce":
            y = x.clone(memory_format=torch.contiguous_format)  # statistics: order does not matter
            summed = comm.all_reduce(route.group, y, about)
            return lambda: (summed.wait(), y)[1]
        if kind == "reduce_scatter":
            y, own = x.new_empty(route.target.shape), x[route.own[0]]  # type: ignore[index]
            leaving = dict(self._leaving(x)) | {comm.rank: own.contiguous()}
            reduced = comm.reduce_scatter(route.group, y, self._by_rank(leaving, x), about)
            memory_format = memory_format_of(x)
            return lambda: (reduced.wait(), y.contiguous(memory_format=memory_format))[1]
        return self._pieces(x, comm)

    def _leaving(self, x: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        return [(piece.peer, x[piece.slices].contiguous()) for piece in self.route.sends]

    def _by_rank(self, known: Mapping[int, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        """One tensor per rank of the group; empty ones for those that get or give nothing."""
        return [known.get(rank, x.new_empty(0)) for rank in self.route.group]

    def _pieces(self, x: torch.Tensor, comm: Communicator) -> Wait:
        """Transfers whose pieces are put (or added) into a new tensor one by one."""
        route = self.route
        arriving = [(piece.peer, x.new_empty(piece.shape)) for piece in route.receives]
        pending = self._post(x, arriving, comm)
        y = self._begun(x)

        def finish() -> torch.Tensor:
            pending.wait()
            return self._put(y, [part for _, part in arriving])

        return finish

    def _own_part(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.route.own[0]] if self.route.own else x.new_empty(self.route.target.shape)

    def _begun(self, x: torch.Tensor) -> torch.Tensor:
        """The new tensor with what this rank itself has of it."""
        y, own = self._new_target(x), self.route.own
        if own is not None:
            y[own[1]] = x[own[0]]
        return y

    def _put(self, y: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts (or adds) what has arrived where it belongs."""
        for piece, part in zip(self.route.receives, parts, strict=True):
            if self.adds:
                y[piece.slices] += part
            else:
                y[piece.slices] = part
        return y

    def _post(
        self, x: torch.Tensor, arriving: list[tuple[int, torch.Tensor]], comm: Communicator
    ) -> Pending:
        """Starts the messages of a transfer in pieces, as one collective where it is one."""
        group, about = self.route.group, self.about
        if self.route.kind == "all_gather":
            mine = torch.empty_like(x, memory_format=torch.contiguous_format)
            parts = dict(arriving)
            everyone = [parts.get(rank, mine) for rank in group]
            return comm.all_gather(group, everyone, x.contiguous(), about)
        leaving = self._leaving(x)
        if self.route.kind == "all_to_all":
            into, out = self._by_rank(dict(arriving), x), self._by_rank(dict(leaving), x)
            return comm.all_to_all(group, into, out, about)
        return comm.exchange(leaving, arriving, about)

    def _new_target(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor for the target box: zero where parts are added, `fill` outside the tensor."""
        route, memory_format = self.route, memory_format_of(x)
        y = torch.empty(
            route.target.shape, dtype=x.dtype, device=x.device, memory_format=memory_format
        )
        if self.adds:
            return y.zero_()
        covered = [*(p.slices for p in route.receives), *([route.own[1]] if route.own else [])]
        held = sum(prod(s.stop - s.start for s in slices) for slices in covered)
        return y if held == y.numel() else y.fill_(filling(self.fill, y.dtype))


def carry(
    transfer: Transfer, x: torch.Tensor, comm: Communicator, about: About = ANYTHING
) -> torch.Tensor:
    """This rank's part after the transfer."""
    return Delivery.of(transfer, comm.rank, about).begin(x, comm)()
