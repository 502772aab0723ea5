"""The gradient engine: sums of gradients that begin while the backward pass goes on.

Gradients are packed into buffers, one per chunk and segment, of which the parameters' `.grad` are
views. A chunk's sums start when its last layer is done, on process groups of their own; every rank
starts the same sums in the same order, whether it had samples or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardwise.comm import About, Communicator, Pending
from shardwise.engine import Engine
from shardwise.program import Program, Run
from shardwise.strategies import Gradients

Tensors = dict[str, torch.Tensor]
TRIALS = 3  # backward passes of each engine that is tried; the first one does not count


@dataclass(eq=False)
class Buffer:
    """The gradients that one segment sums at once, back to back."""

    ranks: tuple[int, ...]
    data: torch.Tensor
    views: Tensors


@dataclass(eq=False)
class Chunk:
    """Layers whose gradients are summed together."""

    label: str
    start: int  # the position in the backward pass after which its sums start
    buffers: list[Buffer]


@dataclass(eq=False)
class GradientSums:
    """The chunks of one program on this rank, and the sums that are under way."""

    chunks: list[Chunk]
    params: Tensors  # those that this rank holds a block of
    comm: Communicator
    written: set[str] = field(default_factory=set)
    whole: Tensors = field(default_factory=dict)  # gradients that need no sum
    pending: list[tuple[frozenset[str], Pending]] = field(default_factory=list)
    late: Late = field(default_factory=lambda: Late())

    @classmethod
    def of(
        cls,
        program: Program,
        params: Mapping[str, torch.Tensor],
        engine: Engine,
        comm: Communicator,
    ) -> GradientSums:
        """Lays out the buffers: parameters by the layer of backward that completes them."""
        last: dict[str, int] = {}
        for position, step in enumerate(program.backward):
            if isinstance(step, Run):
                last |= {name: position for name in step.params if name not in program.gathered}
        layers: dict[int, list[str]] = {}
        for name, position in last.items():
            layers.setdefault(position, []).append(name)
        positions = sorted(layers)
        itemsize = max((p.element_size() for p in params.values()), default=4)
        sizes = [
            sum(float(program.params[n].numels.max()) * itemsize for n in layers[position])
            for position in positions
        ]
        held, positions = positions[: engine.held], positions[engine.held :]
        groups, start = [], 0
        for count in engine.chunks(sizes[engine.held :]):
            groups.append(positions[start : start + count])
            start += count
        chunks = [_chunk(group, group[-1], layers, program, params, comm.rank) for group in groups]
        end = max(last.values(), default=0)
        chunks += [_chunk([one], end, layers, program, params, comm.rank) for one in held]
        used = [n for step in program.backward if isinstance(step, Run) for n in step.params]
        held = {n: params[n] for n in used if program.params[n].numels[comm.rank]}
        return cls(chunks, held, comm)

    def fits(self, params: Mapping[str, torch.Tensor]) -> bool:
        """Whether the buffers are still right: a model may have moved to another type or device."""
        return all(
            params[n].dtype == p.dtype and params[n].device == p.device
            for n, p in self.params.items()
        )

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """A part of a parameter's gradient; a shared parameter has several."""
        view = self._views.get(name)
        if view is None:
            self.whole[name] = self.whole[name] + gradient if name in self.whole else gradient
        elif name in self.written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.written.add(name)

    @property
    def _views(self) -> Tensors:
        if not hasattr(self, "_known_views"):
            self._known_views: Tensors = {
                name: view
                for chunk in self.chunks
                for buffer in chunk.buffers
                for name, view in buffer.views.items()
            }
        return self._known_views

    def after(self, position: int) -> None:
        """A step of the backward pass is done: starts the sums that it completes."""
        for chunk in self.chunks:
            if position == chunk.start:
                about = About(f"the gradients of {chunk.label}", "gradients")
                for buffer in chunk.buffers:
                    self._zero(buffer)
                    pending = self.comm.all_reduce(buffer.ranks, buffer.data, about)
                    self.pending.append((frozenset(buffer.views), pending))

    def _zero(self, buffer: Buffer) -> None:
        """A rank without samples adds nothing."""
        for name, view in buffer.views.items():
            if name not in self.written:
                view.zero_()

    def wait(self, wanted: Collection[str] | None = None) -> None:
        """Waits for the sums of these parameters, or for all."""
        due = [own for own in self.pending if wanted is None or not own[0].isdisjoint(wanted)]
        self.pending = [own for own in self.pending if own not in due]
        for _, pending in due:
            pending.wait()

    def finish(self, delayed: Late | None = None, wait: str = "backward") -> Tensors:
        """The gradients of this rank's blocks, after all sums or ("step") while these go on.

        Late ones are put off further where somebody collects them, and ("use") so are all sums.
        """
        if wait == "backward":
            self.wait()
        if delayed is None:
            for name, gradient in self.late.take().items():
                self.add(name, gradient.to(self.params[name].dtype))  # layers may use another
        else:
            delayed.entries += self.late.entries
        put_off = self._put_off(delayed) if delayed is not None and wait == "use" else frozenset()
        late, self.late = self.late.names, Late()
        alone = {n: p for n, p in self.params.items() if n not in self._views and n not in late}
        for name, param in alone.items():
            if name not in self.whole:  # a rank without samples
                self.whole[name] = torch.zeros_like(param)
        views = {name: view for name, view in self._views.items() if name not in put_off}
        found = views | self.whole
        self.written, self.whole = set(), {}
        return found

    def _put_off(self, delayed: Late) -> frozenset[str]:
        """Sums that go on become gradients that are late; in the order in which they started."""
        names = frozenset(name for own, _ in self.pending for name in own)
        for own, pending in self.pending:
            delayed.entries.append((sorted(own), partial(self._arrived, sorted(own), pending)))
        self.pending = []
        return names

    def _arrived(self, names: list[str], pending: Pending) -> list[torch.Tensor | None]:
        pending.wait()
        return [self._views[name] for name in names]


class Choice:
    """Which of several engines to use: each is tried in turn, then the fastest of them stays."""

    def __init__(self, engines: list[Engine], comm: Communicator) -> None:
        self.engines, self.comm = engines, comm
        self._seconds: list[list[float]] = [[] for _ in engines]
        self._trials = 0

    @property
    def decided(self) -> bool:
        return len(self.engines) == 1

    @property
    def engine(self) -> Engine:
        return self.engines[self._trials % len(self.engines)]

    def note(self, seconds: float) -> None:
        """A backward pass with the present engine took so long; all ranks decide together."""
        if self.decided:
            return
        self._seconds[self._trials % len(self.engines)].append(seconds)
        self._trials += 1
        if self._trials == TRIALS * len(self.engines):
            ranks = self.comm.gather_objects([min(own[1:]) for own in self._seconds])
            slowest = [max(own) for own in zip(*ranks, strict=True)]
            self.engines = [self.engines[slowest.index(min(slowest))]]


@dataclass(eq=False)
class Late:
    """Gradients that are computed when they are due: the parameters of a layer, and how."""

    entries: list[tuple[list[str], Gradients]] = field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for names, _ in self.entries for name in names)

    def take(self, wanted: frozenset[str] | None = None) -> Tensors:
        """Computes what was put off: all, or the layers with a wanted parameter."""
        due = [entry for entry in self.entries if wanted is None or wanted & set(entry[0])]
        self.entries = [entry for entry in self.entries if entry not in due]
        found: Tensors = {}
        for names, compute in due:
            for name, gradient in zip(names, compute(), strict=False):
                if gradient is not None:
                    found[name] = found[name] + gradient if name in found else gradient
        return found


def _chunk(
    positions: list[int],
    start: int,
    layers: Mapping[int, list[str]],
    program: Program,
    params: Mapping[str, torch.Tensor],
    rank: int,
) -> Chunk:
    names = [name for position in positions for name in layers[position]]
    return Chunk(_label(names), start, _buffers(names, program, params, rank))


def _label(names: list[str]) -> str:
    """The layers that these parameters belong to."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _buffers(
    names: list[str], program: Program, params: Mapping[str, torch.Tensor], rank: int
) -> list[Buffer]:
    """One buffer per segment and kind of number; what this rank alone holds needs none."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        layout, param = program.params[name], params[name]
        if layout.numels[rank] == 0:
            continue
        ranks = layout.segment(rank)
        if len(ranks) > 1:
            groups.setdefault((ranks, param.dtype, param.device), []).append(name)
    found = []
    for (ranks, dtype, device), members in groups.items():
        numels = [params[name].numel() for name in members]
        data = torch.zeros(sum(numels), dtype=dtype, device=device)
        parts = data.split(numels)
        views = {n: part.view(params[n].shape) for n, part in zip(members, parts, strict=True)}
        found.append(Buffer(ranks, data, views))
    return found
