"""Optimizer state that ranks with the same weights share (ZeRO, stage 1): each keeps a part of it.

Ranks that differ only in samples, depth, height and width hold the same block of a weight, and the
same sum of its gradients. Each updates a part of the block, for which alone it keeps momentum and
the like, and gives it to the others. A part is a box, so that what is known of blocks holds for
parts as well: which optimizers are right on them, how norms are found, what a checkpoint writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm import About, Communicator, Pending
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout, blocks
from shardwise.runtime.agreement import agree_on, checksum, together
from shardwise.runtime.block import BlockParameter, plain
from shardwise.runtime.optimizer_checks import check_optimizer
from shardwise.runtime.place import Place
from shardwise.runtime.state import State

DENSE: Any = {"memory_format": torch.contiguous_format}
MESSAGE_BYTES = 8 << 20  # of blocks that are given out at once; two such messages are under way


def parts_of(layout: Layout, turn: int = 0) -> Layout:
    """Of every block, a part for each of the ranks that hold it; who has the larger, goes in turn.

    >>> print(parts_of(Layout.replicated((5, 3), 2)))
    0:[0:2, 0:3] 1:[2:5, 0:3]
    """
    bounds = layout.bounds.copy()
    for ranks in layout.segments:
        sizes = layout[ranks[0]].shape
        dim = min(range(len(sizes)), key=lambda d: -(-sizes[d] // len(ranks)) / sizes[d])
        parts = blocks(sizes[dim], len(ranks)) + bounds[ranks[0], dim, 0]
        bounds[list(ranks), dim] = np.roll(parts, turn, axis=0)
    return Layout.of(layout.shape, list(np.moveaxis(bounds, 1, 0)))


@dataclass(frozen=True, eq=False)
class Shared:
    """A parameter of which ranks hold the same blocks, and each updates a part."""

    name: str
    held: Layout
    place: Place  # of the parts

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those with the same block as this one, if it has any."""
        rank = self.place.comm.rank
        return self.held.segment(rank) if self.held.numels[rank] else ()

    def box(self, rank: int) -> Box:
        return self.place.layout[rank]

    def part(self, block: torch.Tensor, rank: int) -> torch.Tensor:
        """What is a rank's part of this rank's block, in the same memory."""
        box = self.box(rank)
        if box.empty:
            return block.new_empty(box.shape)
        return block[box.slices_in(self.held[self.place.comm.rank])]


def shared_params(state: State) -> dict[str, Shared]:
    """Parameters whose state can be shared; that of single numbers is kept by all."""
    comm, found = state.comm, {}
    for turn, (name, param) in enumerate(state.blocks.params().items()):
        if comm.size > 1 and param.ndim:
            everywhere = Layout.replicated(tuple(param.shape), comm.size)
            held = state.blocks.layouts.get(name, everywhere)
            if held.segments:
                found[name] = Shared(name, held, Place(name, parts_of(held, turn), comm))
    return found


class Sharded(Optimizer):
    """Keeps and updates this rank's part of every block, and has the others from those ranks."""

    shardwise_kind: type[Optimizer]
    _model: State
    _shared: dict[str, Shared]
    _lane: Communicator

    def share(self, state: State) -> None:
        """From now on, with the ranks that hold the same blocks of this model."""
        if any(group.get("differentiable") for group in self.param_groups):
            raise ShardwiseError(
                "shard_state=True and differentiable=True: a step that gradients go through is "
                "that of whole weights; leave out one of them"
            )
        self._model, self._shared = state, shared_params(state)
        self._lane = state.comm.in_lane("optimizer")
        segments = {ranks for own in self._shared.values() for ranks in own.held.segments}
        self._lane.prepare(sorted(segments))
        self._cut_blocks()
        self.register_step_pre_hook(_agree_unless_closure)

    def shardwise_place(self, param: torch.Tensor) -> Place | None:
        """Where what is kept of a parameter lies, if ranks share it."""
        found = self._known().get(id(param))
        return None if found is None else found.place

    def _known(self) -> dict[int, Shared]:
        """By the ids of parameters, which may have been replaced since the last step."""
        named = self._model.blocks.params()
        return {id(named[name]): own for name, own in self._shared.items() if name in named}

    def _cut_blocks(self) -> None:
        """Of what was kept of blocks from the start, Adagrad's sums say, this rank's parts."""
        known = self._known()
        for param, kept in self.state.items():
            own, shape = known.get(id(param)), tuple(param.shape)
            if own is None:
                continue
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) == shape:
                    kept[key] = own.part(plain(value), self._lane.rank).clone(**DENSE)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        check_optimizer(self)  # which cuts what is whole
        for kept in self.state.values():
            for key, value in kept.items():
                if isinstance(value, torch.Tensor):
                    kept[key] = value.contiguous()  # as parts are

    # -- a step --------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._model.gradients.wait()
            self.agree()
        step: Any = self.shardwise_kind.step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step  # hooks have been run
        with together(self._model.comm, "an optimizer's step"):
            updated = self._updated()
            with self._as_parts(updated):
                step(self)
            self._give_out(updated)
        return loss

    def agree(self) -> None:
        """Raises on all ranks where one is about to update others than the first."""
        names = [own.name for _, own in self._updated()]
        with together(self._model.comm, "an optimizer's step"):
            agree_on(checksum(names), "has gradients of other parameters", self._model.comm)

    def _updated(self) -> list[tuple[nn.Parameter, Shared]]:
        known = self._known()
        params = [param for group in self.param_groups for param in group["params"]]
        return [(p, known[id(p)]) for p in params if p.grad is not None and id(p) in known]

    @contextmanager
    def _as_parts(self, updated: list[tuple[nn.Parameter, Shared]]) -> Iterator[None]:
        """Within, the optimizer's parameters are this rank's parts of them."""
        aware = getattr(self.shardwise_kind, "knows_blocks", False)
        parts = {id(param): _part(param, own, aware) for param, own in updated}
        before = [group["params"] for group in self.param_groups]
        self._rekey(parts)
        for group in self.param_groups:
            group["params"] = [parts.get(id(param), param) for param in group["params"]]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, before, strict=True):
                group["params"] = params
            self._rekey({id(parts[id(param)]): param for param, _ in updated})
        for param, own in updated:
            _put_back(parts[id(param)], param, own)

    def _rekey(self, others: dict[int, Any]) -> None:
        """What is kept belongs to other tensors from now on, by the ids of those it belonged to."""
        kept = dict(self.state)
        self.state.clear()
        self.state.update({others.get(id(key), key): value for key, value in kept.items()})

    # -- new values ----------------------------------------------------------------------------

    @torch.no_grad()
    def _give_out(self, updated: list[tuple[nn.Parameter, Shared]]) -> None:
        """Every rank's parts to those that hold the same blocks, a few blocks at a time."""
        messages = [GivenOut(each, self._lane) for each in _messages(updated)]
        for before, after in pairwise([None, *messages, None]):
            if after is not None:
                after.start()
            if before is not None:
                before.finish()


def _agree_unless_closure(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A closure computes the gradients that are looked at."""
    if kwargs.get("closure", args[1] if len(args) > 1 else None) is None:
        optimizer.agree()


def _part(param: nn.Parameter, own: Shared, aware: bool) -> nn.Parameter:
    """A parameter in the memory of this rank's part, with its gradient."""
    rank, gradient = own.place.comm.rank, param.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ShardwiseError(
            f"the gradient of {own.name!r} is sparse, and shard_state=True needs dense ones"
        )
    data, slopes = own.part(plain(param), rank), own.part(plain(gradient), rank)
    if not (data.is_contiguous() and slopes.is_contiguous()):
        data, slopes = data.clone(**DENSE), slopes.clone(**DENSE)  # see _put_back
    made = BlockParameter(data, True, own.place) if aware else nn.Parameter(data)
    made.grad = slopes
    return made


def _put_back(part: nn.Parameter, param: nn.Parameter, own: Shared) -> None:
    """New values of a part that was copied: fused optimizers take all memory to be without gaps."""
    there = own.part(plain(param), own.place.comm.rank)
    if there.numel() and plain(part).data_ptr() != there.data_ptr():
        there.copy_(plain(part))


def _messages(
    updated: list[tuple[nn.Parameter, Shared]],
) -> Iterator[list[tuple[torch.Tensor, Shared]]]:
    """Blocks that the same ranks share, of one kind of number, until there are enough bytes."""
    alike: dict[Any, list[tuple[torch.Tensor, Shared]]] = {}
    for param, own in updated:
        if len(own.ranks) > 1:
            key, block = (own.ranks, param.dtype, param.device), plain(param)
            alike.setdefault(key, []).append((block, own))
            if sum(block.nbytes for block, _ in alike[key]) >= MESSAGE_BYTES:
                yield alike.pop(key)
    yield from alike.values()


class GivenOut:
    """Parts of some blocks on their way, back to back; those of all ranks are as long."""

    def __init__(self, pairs: list[tuple[torch.Tensor, Shared]], lane: Communicator) -> None:
        self.pairs, self.lane, self.ranks = pairs, lane, pairs[0][1].ranks
        self.buffers: list[torch.Tensor] = []
        self.pending: Pending | None = None

    def start(self) -> None:
        block, rank = self.pairs[0][0], self.lane.rank
        longest = max(sum(own.box(q).numel for _, own in self.pairs) for q in self.ranks)
        self.buffers = [block.new_empty(longest) for _ in self.ranks]
        mine = self.buffers[self.ranks.index(rank)]
        for view, part in self._views(mine, rank):
            view.copy_(part)
        about = About(f"new values of {self.pairs[0][1].name}", "gradients")
        self.pending = self.lane.all_gather(self.ranks, self.buffers, mine.clone(), about)

    def finish(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        for rank, buffer in zip(self.ranks, self.buffers, strict=True):
            for view, part in self._views(buffer, rank) if rank != self.lane.rank else ():
                part.copy_(view)
        self.buffers = []

    def _views(
        self, buffer: torch.Tensor, rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where a rank's parts lie in its message, and in the blocks here."""
        start = 0
        for block, own in self.pairs:
            part = own.part(block, rank)
            yield buffer[start : start + part.numel()].view(part.shape), part
            start += part.numel()
