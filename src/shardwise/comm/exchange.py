"""Carrying out a transfer: this rank's part of it, over a communicator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.comm import ANYTHING, About, Communicator
from shardwise.geometry.transfer import Route, Slices, Transfer
from shardwise.tensors import filling, memory_format_of

Wait = Callable[[], torch.Tensor]


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
        return _start(self.route, x, self.fill, self.adds, comm, self.about)

    def _recorded(self, x: torch.Tensor, comm: Communicator) -> Wait:
        before = comm.timeline.switch(f"{self.about.name} packed", "copy")
        wait = _start(self.route, x, self.fill, self.adds, comm, self.about)
        comm.timeline.switch(*before)

        def unpacked() -> torch.Tensor:
            before = comm.timeline.switch(f"{self.about.name} unpacked", "copy")
            y = wait()
            comm.timeline.switch(*before)
            return y

        return unpacked


def carry(
    transfer: Transfer, x: torch.Tensor, comm: Communicator, about: About = ANYTHING
) -> torch.Tensor:
    """This rank's part after the transfer."""
    return Delivery.of(transfer, comm.rank, about).begin(x, comm)()


def _start(
    route: Route, x: torch.Tensor, fill: float, additive: bool, comm: Communicator, about: About
) -> Wait:
    if route.kind == "local":
        y = x[route.own[0]] if route.own else x.new_empty(route.target.shape)
        return lambda: y
    if route.kind == "all_reduce":
        y = x.clone(memory_format=torch.contiguous_format)  # statistics: order does not matter
        summed = comm.all_reduce(route.group, y, about)
        return lambda: (summed.wait(), y)[1]
    if route.kind == "reduce_scatter":
        y = x.new_empty(route.target.shape)
        outgoing = _by_rank(route, [x[piece.slices].contiguous() for piece in route.sends])
        outgoing[route.group.index(comm.rank)] = x[route.own[0]].contiguous()  # type: ignore[index]
        reduced = comm.reduce_scatter(route.group, y, outgoing, about)
        memory_format = memory_format_of(x)
        return lambda: (reduced.wait(), y.contiguous(memory_format=memory_format))[1]
    return _pieces(route, x, fill, additive, comm, about)


def _by_rank(route: Route, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor per rank of the group; a rank's own place is still free (empty)."""
    found = {piece.peer: t for piece, t in zip(route.sends, tensors, strict=True)}
    none = tensors[0].new_empty(0)
    return [found.get(rank, none) for rank in route.group]


def _pieces(
    route: Route, x: torch.Tensor, fill: float, additive: bool, comm: Communicator, about: About
) -> Wait:
    """Transfers whose pieces are put (or added) into a new tensor one by one."""
    arrived = [x.new_empty(piece.shape) for piece in route.receives]
    if route.kind == "all_gather":
        parts = {piece.peer: part for piece, part in zip(route.receives, arrived, strict=True)}
        mine = torch.empty_like(x, memory_format=torch.contiguous_format)
        everyone = [parts.get(rank, mine) for rank in route.group]
        pending = comm.all_gather(route.group, everyone, x.contiguous(), about)
    else:
        outgoing = [x[piece.slices].contiguous() for piece in route.sends]
        if route.kind == "all_to_all":
            received = {p.peer: part for p, part in zip(route.receives, arrived, strict=True)}
            buffers = [received.get(rank, x.new_empty(0)) for rank in route.group]
            pending = comm.all_to_all(route.group, buffers, _by_rank(route, outgoing), about)
        else:
            sends = [(p.peer, t) for p, t in zip(route.sends, outgoing, strict=True)]
            receives = [(p.peer, t) for p, t in zip(route.receives, arrived, strict=True)]
            pending = comm.exchange(sends, receives, about)
    y = _new_target(route, x, fill, additive)
    if route.own is not None:
        y[route.own[1]] = x[route.own[0]]

    def finish() -> torch.Tensor:
        pending.wait()
        for piece, part in zip(route.receives, arrived, strict=True):
            if additive:
                y[piece.slices] += part
            else:
                y[piece.slices] = part
        return y

    return finish


def _new_target(route: Route, x: torch.Tensor, fill: float, additive: bool) -> torch.Tensor:
    """The tensor for the target box: zero where parts are added, `fill` outside the tensor."""
    shape, memory_format = route.target.shape, memory_format_of(x)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    if additive:
        return y.zero_()
    covered = [*(p.slices for p in route.receives), *([route.own[1]] if route.own else [])]
    held = sum(_numel(slices) for slices in covered)
    return y if held == y.numel() else y.fill_(filling(fill, y.dtype))


def _numel(slices: Slices) -> int:
    return int(np.prod([s.stop - s.start for s in slices], dtype=np.int64))
