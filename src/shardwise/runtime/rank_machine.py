"""A rank as the interpreter's machine: tensors, blocks that are functions, and real messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.plans.program import Cut, Move, Program, Run, Segment
from shardwise.runtime.bound import Bound
from shardwise.runtime.compiling import GRAPHS, own_memory
from shardwise.runtime.gradient_sums import GradientSums
from shardwise.runtime.lowering import Types
from shardwise.runtime.recomputing import FirstRun, Kept
from shardwise.runtime.wrapping import Wrap, recorded
from shardwise.tensors import autocast_to

Tensors = dict[str, torch.Tensor]


@dataclass
class Tape:
    """What a block leaves for its backward pass: its inputs, and where its outputs came from."""

    leaves: Tensors
    edges: dict[str, GradientEdge]


@dataclass
class RankMachine:
    """One pass through a program on this rank, and what it keeps for the way back."""

    bound: Bound
    types: Types
    leaves: Tensors  # the parameters that are trained, as layers see them
    wraps: Sequence[Wrap] = ()  # what is done around every layer
    mode: str | None = None  # of torch.compile, where blocks are compiled
    output: str = "full"  # how the user gets outputs, see `handed_out`
    records: bool = False  # there will be a backward pass
    tapes: dict[int, Tape] = field(default_factory=dict)  # by the id of the block's Run
    kept: dict[Segment, Kept] = field(default_factory=dict)  # of what is computed again

    def __post_init__(self) -> None:
        self.program: Program = self.bound.program
        self.comm: Communicator = self.bound.comm
        plain = self.bound.blocks(self.types)
        self.blocks: Mapping[int, Any] = plain
        if self.mode is not None and not self.wraps:
            # What is compiled with gradients and without may differ in the last bit.
            again = {key: plain[key] for key in self.program.segments}
            self.blocks = {**self.bound.compiled(self.types, self.mode), **again}
        for wrap in self.wraps:
            self.blocks = {key: block.wrapped(wrap) for key, block in self.blocks.items()}
        self.sums: GradientSums  # of the way back, as all that follows
        self.sum_starts: Collection[int]
        self.keeps: bool  # what the forward pass left is kept for another backward pass
        self.whole_gradients: Tensors  # of inputs that every rank has whole

    # -- forward -------------------------------------------------------------------------------

    def run(self, block: Run, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        function, timeline = self.blocks[id(block)], self.comm.timeline
        tapes = self.records and id(block) in self.program.recorded
        with torch.set_grad_enabled(tapes):  # a part of a weight has its gradient too
            weights = function.weights(self.leaves)
        if not tapes:
            made = function(inputs, weights)
        elif (segment := self.program.segments.get(id(block))) is None:
            self.tapes[id(block)], made = self._taped(block, function, inputs, weights)
        else:
            kept = self._kept(segment)
            for name, x in zip(block.inputs, inputs, strict=True):
                if name in segment.inputs:
                    kept.keep(name, x)
            first = FirstRun(block, function, self.bound.totals, self.types.device)
            kept.runs[id(block)] = first
            # With gradients though nobody wants them yet: torch has other kernels without.
            with first.noted(weights):
                _, made = self._taped(block, function, inputs, weights)
        if timeline.on:
            timeline.switch()
        return made

    def _kept(self, segment: Segment) -> Kept:
        return self.kept.setdefault(segment, Kept())

    def _taped(
        self,
        block: Run,
        function: Callable[..., Sequence[torch.Tensor]],
        inputs: list[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> tuple[Tape, list[torch.Tensor]]:
        """Runs a block for a backward pass."""
        needed, named = self.program.differentiable, zip(block.inputs, inputs, strict=True)
        leaves = {name: _leaf(x, name in needed) for name, x in named}
        with torch.enable_grad():
            made = function(leaves.values(), weights)
            edges = {
                name: get_gradient_edge(y if y.grad_fn is not None else y.view_as(y))
                for name, y in zip(block.outputs, made, strict=True)
                if y.requires_grad
            }
        return Tape(leaves, edges), [y.detach() for y in made]

    def start(self, move: Move, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.comm.timeline.place = self.program.origins[move.target]
        delivery = self.bound.deliveries[move.target]
        wait = delivery.begin(value, self.comm)
        if not self.records or move.target not in self.program.repeated:
            return wait

        def kept() -> torch.Tensor:
            y = wait()
            for segment in self.program.repeated[move.target]:
                self._kept(segment).received[move.target] = delivery.received(y)
            return y

        return kept

    def cut(self, cut: Cut, value: torch.Tensor) -> torch.Tensor:
        return self.bound.cutters[cut.target].cut(value)

    def hand_out(self, output: str, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        delivery = self.bound.deliveries_out(self.output).get(output)
        return (lambda: value) if delivery is None else delivery.begin(value, self.comm)

    # -- backward ------------------------------------------------------------------------------

    def turned(self, sums: GradientSums, keeps: bool) -> RankMachine:
        """The same for the way back, whose gradients of weights go to these sums."""
        machine = copy.copy(self)  # which goes with the sums, whose memory is used again
        machine.sums, machine.sum_starts = sums, sums.starting
        machine.keeps, machine.whole_gradients = keeps, {}
        self.bound.delayed.clear()  # of a pass that failed
        return machine

    def compute_again(self, segment: Segment) -> None:
        kept = self.kept[segment] if self.keeps else self.kept.pop(segment)
        values, blocks, device = kept.values, self.bound.blocks(self.types), self.types.device
        timeline = self.comm.timeline
        for step, last_used in zip(segment.steps, segment.frees, strict=True):
            if isinstance(step, Move):
                timeline.switch(f"{step.target} again", "copy")
                delivery, received = self.bound.deliveries[step.target], kept.received[step.target]
                values[step.target] = delivery.again(values[step.source], received)
            else:
                function, first = blocks[id(step)], kept.runs[id(step)]
                if timeline.on:
                    function = function.wrapped(partial(recorded, timeline, kind="recompute"))
                inputs = [values[name] for name in step.inputs]
                autocast = autocast_to(device.type if device else "cpu", self.types.autocast)
                with torch.enable_grad():
                    weights = function.weights(self.leaves)
                with autocast, first.again(weights) as weights:
                    tape, made = self._taped(step, function, inputs, weights)
                self.tapes[id(step)] = tape
                values |= zip(step.outputs, made, strict=True)
                del inputs, made
            for name in last_used:
                values.pop(name, None)
        timeline.switch()

    def run_back(
        self, block: Run, gradients: list[torch.Tensor | None]
    ) -> list[tuple[str, torch.Tensor]]:
        keeps = self.keeps and id(block) not in self.program.segments
        tape = self.tapes[id(block)] if keeps else self.tapes.pop(id(block))
        pairs = [
            (tape.edges[name], gradient)
            for name, gradient in zip(block.outputs, gradients, strict=True)
            if gradient is not None and name in tape.edges
        ]
        if not pairs:
            return []
        timeline = self.comm.timeline
        timeline.place = block.ops[-1].local.layer.name
        if timeline.on:
            timeline.switch(timeline.place, "backward")
        leaves = {name: x for name, x in tape.leaves.items() if x.requires_grad}
        wanted = [*leaves.values(), *(self.leaves[name] for name in block.params)]
        found = _differentiated(pairs, wanted, keeps)
        if self.mode in GRAPHS:
            found = [*found[: len(leaves)], *own_memory(found[len(leaves) :])]
        if timeline.on:
            timeline.switch("gradients packed", "copy")
        self.sums.add_all(zip(block.params, found[len(leaves) :], strict=True))
        self.sums.delayed.entries += self.bound.delayed
        self.bound.delayed.clear()
        if timeline.on:
            timeline.switch()
        named = zip(leaves, found, strict=False)
        return [(name, gradient) for name, gradient in named if gradient is not None]

    def start_back(self, move: Move, gradient: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        gradient = self.zeros(move.target) if gradient is None else gradient
        return self.bound.deliveries_back[move.target].begin(gradient, self.comm)

    def cut_back(self, cut: Cut, gradient: torch.Tensor | None) -> None:
        gradient = self.zeros(cut.target) if gradient is None else gradient
        cutter = self.bound.cutters[cut.target]
        if cut.source not in self.whole_gradients:
            self.whole_gradients[cut.source] = gradient.new_zeros(cutter.whole)
        cutter.add(gradient, self.whole_gradients[cut.source])

    def add(self, gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return gradient + other

    def start_sums(self, position: int) -> None:
        self.sums.start(position)

    def zeros(self, name: str) -> torch.Tensor:
        shape, dtype = self.program.boxes[name].shape, self.types.dtypes[name]
        return torch.zeros(shape, dtype=dtype, device=self.types.device)


def _differentiated(
    pairs: list[tuple[Any, torch.Tensor]], wanted: list[torch.Tensor], keeps: bool
) -> Sequence[Any]:
    """Gradients; operators that torch cannot differentiate are refused as it names them."""
    outputs, gradients = zip(*pairs, strict=True)
    try:
        return torch.autograd.grad(outputs, wanted, gradients, keeps, allow_unused=True)
    except RuntimeError as error:
        if "is not implemented" in str(error):
            raise ShardwiseError(f"backward pass: {str(error).splitlines()[0]}") from error
        raise


def _leaf(x: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    x = x.detach()
    can_have_one = x.is_floating_point() or x.is_complex()
    return x.requires_grad_() if needs_gradient and can_have_one else x
