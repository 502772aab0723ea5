"""The interpreter: runs a program forward and backward on this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.plans.program import Move, Program, Run, Step
from shardwise.runtime.bound import Blocks, Bound
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
class Runtime:
    """One pass through a program, and what it keeps for the way back."""

    bound: Bound
    types: Types
    leaves: Tensors  # the parameters that are trained, as layers see them
    wraps: Sequence[Wrap] = ()  # what is done around every layer
    tapes: dict[int, Tape] = field(default_factory=dict)  # by the id of the block's Run

    @property
    def program(self) -> Program:
        return self.bound.program

    @property
    def comm(self) -> Communicator:
        return self.bound.comm

    # -- forward -------------------------------------------------------------------------------

    def forward(self, inputs: Tensors, record: bool) -> Tensors:
        """This rank's part of every output."""
        bound, blocks = self.bound, self._blocks()
        values: dict[str, Any] = {name: self.types.kept(x) for name, x in inputs.items()}
        pending: dict[str, Callable[[], torch.Tensor]] = {}

        def value(name: str) -> torch.Tensor:
            if name in pending:
                values[name] = pending.pop(name)()
            return values[name]

        for index, step in enumerate(bound.program.forward):
            if isinstance(step, Run):
                given = [value(name) for name in step.inputs]
                values |= self._run(step, blocks, given, record)
            elif isinstance(step, Move):
                bound.comm.timeline.place = bound.program.origins[step.target]
                delivery = bound.forth[step.target]
                pending[step.target] = delivery.begin(value(step.source), bound.comm)
            else:
                values[step.target] = bound.cutters[step.target].cut(value(step.source))
            for name in bound.program.frees[index]:
                values.pop(name, None)
        return {name: value(name) for name in bound.program.outputs}

    def _blocks(self) -> Blocks:
        blocks = self.bound.blocks(self.types)
        for wrap in self.wraps:
            blocks = {key: block.wrapped(wrap) for key, block in blocks.items()}
        return blocks

    def _run(self, run: Run, blocks: Blocks, inputs: list[torch.Tensor], record: bool) -> Tensors:
        block, timeline = blocks[id(run)], self.comm.timeline
        if not record or id(run) not in self.program.recorded:
            made = block(inputs, block.weights(self.leaves))
        else:
            needed = self.program.differentiable
            named = list(zip(run.inputs, inputs, strict=True))
            leaves = {name: _leaf(x, name in needed) for name, x in named}
            with torch.enable_grad():
                made = block(leaves.values(), block.weights(self.leaves))
                edges = {
                    name: get_gradient_edge(y if y.grad_fn is not None else y.view_as(y))
                    for name, y in zip(run.outputs, made, strict=True)
                    if y.requires_grad
                }
            self.tapes[id(run)] = Tape(leaves, edges)
            made = [y.detach() for y in made]
        if timeline.on:
            timeline.switch()
        return dict(zip(run.outputs, made, strict=True))

    # -- backward ------------------------------------------------------------------------------

    def backward(
        self,
        gradients: Tensors,
        sums: GradientSums,
        reached: Collection[str],
        keep: bool = False,
    ) -> Tensors:
        """From gradients of the outputs to those of the inputs; those of weights go to `sums`.

        Only layers that the loss depends on (`reached`) take part, the same on all ranks. What the
        forward pass left is used up, or kept for another time.
        """
        flow = _Flow({name: self.types.kept(gradient) for name, gradient in gradients.items()})
        bound = self.bound
        bound.late.clear()  # of a pass that failed
        whole: Tensors = {}  # gradients of inputs that every rank has whole
        for position, step in enumerate(self.program.backward):
            if not self._is_reached(step, reached):
                sums.after(position)
            elif isinstance(step, Run):
                self._run_backward(step, flow, sums, keep)
                sums.after(position)
                sums.late.entries += bound.late
                bound.late.clear()
            elif isinstance(step, Move):
                gradient = flow.take(step.target, self._zeros(step.target))
                back = bound.back[step.target].begin(gradient, bound.comm)
                flow.add_later(step.source, back)
            else:
                gradient = flow.take(step.target, self._zeros(step.target))
                cutter = bound.cutters[step.target]
                if step.source not in whole:
                    whole[step.source] = gradient.new_zeros(cutter.whole)
                cutter.add(gradient, whole[step.source])
        if not keep:
            self.tapes.clear()
        inputs = {name: flow.take(name, None) for name in self.program.inputs}
        return {name: g for name, g in (inputs | whole).items() if g is not None}

    def _is_reached(self, step: Step, reached: Collection[str]) -> bool:
        if isinstance(step, Run):
            return any(op.local.layer.name in reached for op in step.ops)
        return self.program.origins[step.target] in reached

    def _run_backward(self, run: Run, flow: _Flow, sums: GradientSums, keep: bool) -> None:
        tape = self.tapes[id(run)] if keep else self.tapes.pop(id(run))
        outputs, gradients = [], []
        for name in run.outputs:
            gradient = flow.take(name, None)
            if gradient is not None and name in tape.edges:
                outputs.append(tape.edges[name])
                gradients.append(gradient)
        leaves = {name: x for name, x in tape.leaves.items() if x.requires_grad}
        stored = {name: self.leaves[name] for name in run.params}
        if not outputs:
            return
        timeline = self.comm.timeline
        timeline.place = run.ops[-1].local.layer.name
        if timeline.on:
            timeline.switch(timeline.place, "backward")
        wanted = [*leaves.values(), *stored.values()]
        found = _differentiated(outputs, wanted, gradients, keep)
        if timeline.on:
            timeline.switch("gradients packed", "copy")
        for name, gradient in zip(leaves, found, strict=False):
            if gradient is not None:
                flow.add(name, gradient)
        for name, gradient in zip(stored, found[len(leaves) :], strict=True):
            if gradient is not None:
                sums.add(name, gradient)
        if timeline.on:
            timeline.switch()

    def _zeros(self, name: str) -> Callable[[], torch.Tensor]:
        shape, dtype = self.program.boxes[name].shape, self.types.dtype(name)
        return lambda: torch.zeros(shape, dtype=dtype, device=self.types.device)


def _differentiated(outputs: list[Any], wanted: Any, gradients: Any, keep: bool) -> tuple[Any, ...]:
    """Gradients; operators that torch cannot differentiate are refused as it names them."""
    try:
        return torch.autograd.grad(outputs, wanted, gradients, keep, allow_unused=True)
    except RuntimeError as error:
        if "is not implemented" in str(error):
            raise ShardwiseError(f"backward pass: {str(error).splitlines()[0]}") from error
        raise


class _Flow:
    """Gradients on their way: those that are here and those still under way, by value."""

    def __init__(self, gradients: Tensors) -> None:
        self.here: Tensors = dict(gradients)
        self.coming: dict[str, list[Callable[[], torch.Tensor]]] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        self.here[name] = self.here[name] + gradient if name in self.here else gradient

    def add_later(self, name: str, gradient: Callable[[], torch.Tensor]) -> None:
        self.coming.setdefault(name, []).append(gradient)

    def take(self, name: str, default: Callable[[], torch.Tensor] | None) -> Any:
        for gradient in self.coming.pop(name, []):
            self.add(name, gradient())
        if name in self.here:
            return self.here.pop(name)
        return default() if default is not None else None


def _leaf(x: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    x = x.detach()
    can_have_one = x.is_floating_point() or x.is_complex()
    return x.requires_grad_() if needs_gradient and can_have_one else x
