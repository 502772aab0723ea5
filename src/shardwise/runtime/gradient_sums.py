"""The gradient engine: sums of gradients that begin while the backward pass goes on.

Gradients are packed into buffers, one per chunk and segment, of which the parameters' `.grad` are
views. A chunk's sums start when its last layer is done, on process groups of their own; every rank
starts the same sums in the same order, whether it had samples or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from shardwise.comm import About, Communicator, Pending
from shardwise.errors import ShardwiseError
from shardwise.operators import Gradients
from shardwise.plans.gradient_schedule import Engine, gradient_chunks
from shardwise.plans.program import Program, Run

Tensors = dict[str, torch.Tensor]
TRIALS = 3  # backward passes of each engine that is tried; the first one does not count


@dataclass(frozen=True)
class Pack:
    """Gradients that one segment sums at once, back to back."""

    ranks: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    def views(self, data: torch.Tensor) -> Tensors:
        parts = data.split([shape.numel() for shape in self.shapes])
        each = zip(self.names, parts, self.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in each}


@dataclass(frozen=True)
class PackedLayers:
    """Layers whose gradients are summed together."""

    label: str
    start: int  # the position in the backward pass after which its sums start
    packs: tuple[Pack, ...]


@dataclass(frozen=True)
class Chunks:
    """What one program sums, and when, on this rank."""

    chunks: tuple[PackedLayers, ...]
    held: frozenset[str]  # parameters that this rank holds a block of

    @classmethod
    def of(
        cls, program: Program, params: Mapping[str, torch.Tensor], engine: Engine, rank: int
    ) -> Chunks:
        """The chunks of the engine's schedule, as this rank's buffers."""
        itemsize = max((p.element_size() for p in params.values()), default=4)
        chunks = tuple(
            PackedLayers(chunk.label, chunk.start, _packs(chunk.params, program, params, rank))
            for chunk in gradient_chunks(program, engine, itemsize)
        )
        used = [n for step in program.backward if isinstance(step, Run) for n in step.params]
        return cls(chunks, frozenset(n for n in used if program.params[n].numels[rank]))


def _packs(
    names: Iterable[str], program: Program, params: Mapping[str, torch.Tensor], rank: int
) -> tuple[Pack, ...]:
    """One pack per segment and kind of number; what this rank alone holds needs none."""
    groups: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[str]] = {}
    for name in names:
        layout, param = program.params[name], params[name]
        if layout.numels[rank] and len(layout.segment(rank)) > 1:
            key = (layout.segment(rank), param.dtype, param.device)
            groups.setdefault(key, []).append(name)
    return tuple(
        Pack(*key, tuple(members), tuple(params[name].shape for name in members))
        for key, members in groups.items()
    )


class Buffers:
    """Memory for packs: used again in the next pass where nobody else holds on to it."""

    def __init__(self) -> None:
        self._data: dict[Pack, torch.Tensor] = {}

    def take(self, chunks: Chunks) -> dict[Pack, torch.Tensor]:
        """Memory for every pack; what belongs to others than these is given back."""
        before, self._data = self._data, {}
        for pack in (pack for chunk in chunks.chunks for pack in chunk.packs):
            known = before.pop(pack, None)
            if known is None or _num_holders(known) > 1:
                size = sum(shape.numel() for shape in pack.shapes)
                known = torch.empty(size, dtype=pack.dtype, device=pack.device)
            self._data[pack] = known
        return self._data


def _num_holders(data: torch.Tensor) -> int:
    """How many tensors share this memory: a user may have kept a gradient of the last pass."""
    return torch._C._storage_Use_Count(data.untyped_storage()._cdata) - 1  # one is the asker's


class GradientSums:
    """The sums of one backward pass, of which some are under way."""

    def __init__(
        self,
        chunks: Chunks,
        buffers: Mapping[Pack, torch.Tensor],
        params: Mapping[str, torch.Tensor],
        comm: Communicator,
        held: bool = False,
    ) -> None:
        """Where they are `held`, this rank's parts are left as they are, for a later sum."""
        self.buffers, self.comm, self.held = buffers, comm, held
        self.starting: dict[int, list[PackedLayers]] = {}  # by position in the backward pass
        for chunk in () if held else chunks.chunks:
            self.starting.setdefault(chunk.start, []).append(chunk)
        self.params = {name: params[name] for name in sorted(chunks.held)}
        self.views: Tensors = {}
        for pack, data in buffers.items():
            self.views |= pack.views(data)
        self.written: set[str] = set()
        self.whole: Tensors = {}  # gradients that need no sum
        self.pending: list[tuple[frozenset[str], Pending]] = []
        self.delayed = DelayedGradients()
        self.handed: Tensors = {}  # what is in `.grad` while the sums go on

    def add_all(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """What a block gives for its parameters."""
        for name, gradient in gradients:
            if gradient is not None:
                self.add(name, gradient)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """A part of a parameter's gradient; a shared parameter has several."""
        view = self.views.get(name)
        if view is None:
            self.whole[name] = self.whole[name] + gradient if name in self.whole else gradient
        elif name in self.written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.written.add(name)

    def start(self, position: int) -> None:
        """A step of the backward pass is done: starts the sums that it completes."""
        for chunk in self.starting.get(position, ()):
            about = About(f"the gradients of {chunk.label}", "gradients")
            for pack in chunk.packs:
                self._zero(pack)
                pending = self.comm.all_reduce(pack.ranks, self.buffers[pack], about)
                self.pending.append((frozenset(pack.names), pending))

    def _zero(self, pack: Pack) -> None:
        """A rank without samples adds nothing."""
        for name in pack.names:
            if name not in self.written:
                self.views[name].zero_()

    def wait(self, wanted: Collection[str] | None = None) -> None:
        """Waits for the sums of these parameters, or for all."""
        due = [own for own in self.pending if wanted is None or not own[0].isdisjoint(wanted)]
        self.pending = [own for own in self.pending if own not in due]
        for _, pending in due:
            pending.wait()

    def finish(
        self,
        reached: Collection[str],
        delayed: DelayedGradients | None = None,
        wait: str = "backward",
    ) -> Tensors:
        """The gradients of this rank's blocks, after all sums or ("step") while these go on.

        Only what the loss depends on has one (`reached`). Late ones are put off further where
        somebody collects them, and ("use") so are all sums.
        """
        for pack in self.buffers if self.held else ():
            self._zero(pack)
        if wait == "backward":
            self.wait()
        if delayed is None:
            for name, gradient in self.delayed.take().items():
                self.add(name, gradient.to(self.params[name].dtype))  # layers may use another
        else:
            delayed.entries += self.delayed.entries
        put_off: frozenset[str] = frozenset()
        if delayed is not None and wait == "use":
            put_off = self._put_off(delayed, reached)
        delayed_names, found = self.delayed.names, {}
        for name, param in self.params.items():
            if name not in reached or name in put_off:
                continue
            if name in self.views:
                found[name] = self.views[name]
            elif name in self.whole:  # let go of: what nobody else holds, autograd need not copy
                found[name] = self.whole.pop(name)
            elif name not in delayed_names:  # a rank without samples
                found[name] = torch.zeros_like(param)
        return found

    def handed_out(self, found: Tensors) -> Tensors:
        """The same memory with versions of its own, which tell whether somebody else writes."""
        self.handed = {name: gradient.data for name, gradient in found.items()}
        return self.handed

    def check_untouched(self, wanted: Collection[str] | None = None) -> None:
        """Raises where one of these gradients, or any, was added to before its sum was made."""
        looked_at = [name for name in self.handed if wanted is None or name in wanted]
        names = [name for name in looked_at if self.handed.pop(name)._version]
        if names:
            raise ShardwiseError(
                f"the gradient of {names[0]!r} was changed while it was summed: a loss that "
                "depends on a parameter itself, a penalty say, and clipping need "
                "Engine(wait='backward')"
            )

    def _put_off(self, delayed: DelayedGradients, reached: Collection[str]) -> frozenset[str]:
        """Sums that go on become gradients that come later, in the order in which they started."""
        names = frozenset(name for own, _ in self.pending for name in own)
        for own, pending in self.pending:
            due = sorted(own & set(reached))
            delayed.entries.append((due, partial(self._arrived, due, pending)))
        self.pending = []
        return names

    def _arrived(self, names: list[str], pending: Pending) -> list[torch.Tensor | None]:
        pending.wait()
        return [self.views[name] for name in names]


class EngineChoice:
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
class DelayedGradients:
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
            for name, gradient in zip(names, compute(), strict=True):
                if gradient is not None:
                    found[name] = found[name] + gradient if name in found else gradient
        return found
