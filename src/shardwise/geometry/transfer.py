"""Moving a tensor from one layout to another.

There is one rule: rank r sends to rank q what r's source box and q's target box have in common,
and what arrives at the same place is added. From a partition to a cover that is a Gather (halo
exchange, allgather, re-sharding); from a cover to a partition a Reduce (reduce-scatter); from a
cover to itself a Sum (allreduce). The transpose of a transfer is the transfer back, so the backward
of a Gather is a Reduce and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout

Slices = tuple[slice, ...]
Kind = Literal[
    "identity", "local", "messages", "all_gather", "reduce_scatter", "all_to_all", "all_reduce"
]


@dataclass(frozen=True)
class Piece:
    """A part of this rank's tensor that goes to, or comes from, a peer."""

    peer: int
    slices: Slices
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """What one rank does in a transfer."""

    kind: Kind
    source: Box
    target: Box
    group: tuple[int, ...] = ()
    sends: tuple[Piece, ...] = ()
    receives: tuple[Piece, ...] = ()
    own: tuple[Slices, Slices] | None = None  # from the source, to the target


@dataclass(frozen=True)
class Transfer:
    """From the boxes of `source` to those of `target`; outside the tensor lies `fill`."""

    source: Layout
    target: Layout
    fill: float = 0.0
    _routes: dict[int, Route] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def adds(self) -> bool:
        """Whether parts that arrive at the same place are added."""
        return not self.source.is_partition

    @cached_property
    def transpose(self) -> Transfer:
        """The transfer that carries gradients back."""
        return Transfer(self.target, self.source)

    @cached_property
    def messages(self) -> np.ndarray:
        """Elements that rank r sends to rank q; int64 [world, world], zero on the diagonal."""
        overlaps = self.source.overlaps(self.target)
        np.fill_diagonal(overlaps, 0)
        return overlaps

    @cached_property
    def is_identity(self) -> bool:
        """Nothing moves and every rank keeps what it has."""
        return np.array_equal(self.source.bounds, self.target.bounds) and self.source.is_disjoint

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that exchange messages with each other, directly or indirectly."""
        linked = (self.messages + self.messages.T) > 0
        left, found = linked.any(axis=1), []
        while left.any():
            reached = np.zeros_like(left)
            reached[np.flatnonzero(left)[0]] = True
            while ((grown := reached | linked[reached].any(axis=0)) != reached).any():
                reached = grown
            found.append(tuple(np.flatnonzero(reached).tolist()))
            left &= ~reached
        return tuple(found)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that run a collective of the backend."""
        return tuple(g for g in self.components if _kind(self, g) != "messages")

    def route(self, rank: int) -> Route:
        """What this rank sends and receives, compiled once."""
        if rank not in self._routes:
            self._routes[rank] = compile_route(self, rank)
        return self._routes[rank]


def compile_route(transfer: Transfer, rank: int) -> Route:
    """What this rank sends and receives."""
    source, target = transfer.source[rank], transfer.target[rank]
    to, by = transfer.messages[rank], transfer.messages[:, rank]
    if not to.any() and not by.any():
        if source == target:
            return Route("identity", source, target)
        if source.contains(target):
            own = target.slices_in(source) if not target.empty else None
            return Route("local", source, target, own=(own, own) if own else None)
    sends = tuple(
        _piece(peer, source, transfer.target[peer]) for peer in np.flatnonzero(to).tolist()
    )
    receives = tuple(
        _piece(peer, target, transfer.source[peer]) for peer in np.flatnonzero(by).tolist()
    )
    common = source.intersect(target)
    own = None if common.empty else (common.slices_in(source), common.slices_in(target))
    group = next((g for g in transfer.components if rank in g), (rank,))
    kind = _kind(transfer, group)
    return Route(kind, source, target, group, sends, receives, own)


def _piece(peer: int, mine: Box, theirs: Box) -> Piece:
    common = mine.intersect(theirs)
    return Piece(peer, common.slices_in(mine), common.shape)


def _kind(transfer: Transfer, group: tuple[int, ...]) -> Kind:
    """The backend's collective that does the same as this group's messages, if there is one."""
    members = list(group)
    if len(members) < 2:
        return "messages"
    sources, targets = transfer.source.bounds[members], transfer.target.bounds[members]
    same_source, same_target = (sources == sources[0]).all(), (targets == targets[0]).all()
    if same_source and same_target and (sources == targets).all():
        return "all_reduce"
    among = transfer.messages[members][:, members]
    if np.count_nonzero(among) < len(members) * (len(members) - 1):
        return "messages"
    if same_target and _are_parts(transfer.source, members, among.max(axis=1)):
        return "all_gather"
    if same_source and _are_parts(transfer.target, members, among.max(axis=0)):
        return "reduce_scatter"
    return "all_to_all" if len(members) > 2 else "messages"


def _are_parts(layout: Layout, members: list[int], moved: np.ndarray) -> bool:
    """Whether boxes are disjoint, of one shape, and move whole: messages carry what is cropped."""
    shapes = np.diff(layout.bounds[members], axis=-1)
    overlaps = layout.overlaps(layout)[members][:, members]
    disjoint = np.count_nonzero(overlaps) == np.count_nonzero(np.diag(overlaps))
    whole = (moved == layout.numels[members]).all()
    return bool(disjoint and whole and (shapes == shapes[0]).all())
