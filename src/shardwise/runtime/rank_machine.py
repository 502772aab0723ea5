"""A rank as the interpreter's machine: tensors, blocks that are functions, and real messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.plans.program import Cut, Move, Program, Run
from shardwise.runtime.bound import Bound
from shardwise.runtime.compiling import GRAPHS, own_memory
from shardwise.runtime.gradient_sums import GradientSums
from shardwise.runtime.lowering import Types
from shardwise.runtime.wrapping import Wrap

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

    def __post_init__(self) -> None:
        self.program: Program = self.bound.program
        self.comm: Communicator = self.bound.comm
        self.blocks: Mapping[int, Any]
        if self.mode is not None and not self.wraps:
            self.blocks = self.bound.compiled(self.types, self.mode)
        else:
            self.blocks = self.bound.blocks(self.types)
        for wrap in self.wraps:
            self.blocks = {key: block.wrapped(wrap) for key, block in self.blocks.items()}
        self.sums: GradientSums  # of the way back, as all that follows
        self.sum_starts: Collection[int]
        self.keeps: bool  # what the forward pass left is kept for another backward pass
        self.whole_gradients: Tensors  # of inputs that every rank has whole

    # -- forward -------------------------------------------------------------------------------

    def run(self, block: Run, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        function, timeline = self.blocks[id(block)], self.comm.timeline
        if not self.records or id(block) not in self.program.recorded:
            made = function(inputs, function.weights(self.leaves))
        else:
            needed = self.program.differentiable
            named = zip(block.inputs, inputs, strict=True)
            leaves = {name: _leaf(x, name in needed) for name, x in named}
            with torch.enable_grad():
                made = function(leaves.values(), function.weights(self.leaves))
                edges = {
                    name: get_gradient_edge(y if y.grad_fn is not None else y.view_as(y))
                    for name, y in zip(block.outputs, made, strict=True)
                    if y.requires_grad
                }
            self.tapes[id(block)] = Tape(leaves, edges)
            made = [y.detach() for y in made]
        if timeline.on:
            timeline.switch()
        return made

    def start(self, move: Move, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.comm.timeline.place = self.program.origins[move.target]
        return self.bound.deliveries[move.target].begin(value, self.comm)

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

    def run_back(
        self, block: Run, gradients: list[torch.Tensor | None]
    ) -> list[tuple[str, torch.Tensor]]:
        tape = self.tapes[id(block)] if self.keeps else self.tapes.pop(id(block))
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
        found = _differentiated(pairs, wanted, self.keeps)
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
