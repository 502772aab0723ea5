"""The interpreter: carries out a program, forward and backward, on a machine.

There are two machines: a rank, whose values are tensors (runtime), and a clock for all ranks, whose
values are nothing but moments (planner). What runs and what is predicted so have the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from shardwise.plans.program import Cut, Move, Program, Run, Segment

Value = TypeVar("Value")


class Machine(Protocol[Value]):
    """What the steps of a program need; a gradient is None where nothing flows back."""

    sum_starts: Collection[int]  # the positions in the backward pass after which sums begin

    def run(self, block: Run, inputs: list[Value]) -> Sequence[Value]:
        """The outputs of a block of layers."""
        ...

    def start(self, move: Move, value: Value) -> Callable[[], Value]:
        """Begins to carry a value to another layout; the result waits for it."""
        ...

    def cut(self, cut: Cut, value: Value) -> Value:
        """The part of an input."""
        ...

    def hand_out(self, output: str, value: Value) -> Callable[[], Value]:
        """Begins to give the user what he is to get of an output; the result waits for it."""
        ...

    def compute_again(self, segment: Segment) -> None:
        """Makes what the backward pass of a segment's blocks needs, which was not kept."""
        ...

    def run_back(self, block: Run, gradients: list[Value | None]) -> Iterable[tuple[str, Value]]:
        """The gradients of a block's inputs, from those of its outputs; it keeps the weights'."""
        ...

    def start_back(self, move: Move, gradient: Value | None) -> Callable[[], Value]:
        """Begins to carry a gradient back; the result waits for it."""
        ...

    def cut_back(self, cut: Cut, gradient: Value | None) -> None:
        """The gradient of the part of an input, of which the machine keeps the whole."""
        ...

    def add(self, gradient: Value, other: Value) -> Value:
        """The gradient of a value with several readers."""
        ...

    def start_sums(self, position: int) -> None:
        """Begins the sums of the gradients that a step of the backward pass has completed."""
        ...


def forward(
    program: Program, machine: Machine[Value], inputs: Mapping[str, Value]
) -> dict[str, Value]:
    """Every output as the user gets it, from the inputs as he gives them."""
    values: dict[str, Value] = dict(inputs)
    coming: dict[str, Callable[[], Value]] = {}

    def value(name: str) -> Value:
        if name in coming:
            values[name] = coming.pop(name)()
        return values[name]

    for step, last_used in zip(program.forward, program.frees, strict=True):
        if isinstance(step, Run):
            made = machine.run(step, [value(name) for name in step.inputs])
            values |= dict(zip(step.outputs, made, strict=True))
            del made  # what is read for the last time is not to be kept alive here
        elif isinstance(step, Move):
            coming[step.target] = machine.start(step, value(step.source))
        else:
            values[step.target] = machine.cut(step, value(step.source))
        for name in last_used:
            values.pop(name, None)
    outputs = dict.fromkeys(program.outputs)  # a model may return one tensor twice
    waits = {name: machine.hand_out(name, value(name)) for name in outputs}
    return {name: wait() for name, wait in waits.items()}


def backward(
    program: Program,
    machine: Machine[Value],
    gradients: Mapping[str, Value],
    reached: Collection[int],
) -> dict[str, Value | None]:
    """From gradients of the outputs to those of the inputs that ranks have parts of.

    Only steps that the loss depends on are taken: `reached` has their positions.
    """
    here: dict[str, Value] = dict(gradients)
    coming: dict[str, list[Callable[[], Value]]] = {}
    complete = _completing(program, machine)

    def add(name: str, gradient: Value) -> None:
        here[name] = machine.add(here[name], gradient) if name in here else gradient

    def take(name: str) -> Value | None:
        for wait in coming.pop(name, ()):
            add(name, wait())
        return here.pop(name, None)

    def run_back(block: Run) -> None:
        complete(block)
        for name, gradient in machine.run_back(block, [take(name) for name in block.outputs]):
            add(name, gradient)

    for position, step in enumerate(program.backward):
        if position in reached:
            if isinstance(step, Run):
                run_back(step)
            elif isinstance(step, Move):
                wait = machine.start_back(step, take(step.target))
                coming.setdefault(step.source, []).append(wait)
            else:
                machine.cut_back(step, take(step.target))
        if position in machine.sum_starts:
            machine.start_sums(position)
    return {name: take(name) for name in program.inputs}


def _completing(program: Program, machine: Machine[Value]) -> Callable[[Run], None]:
    """Computes a block again, with all of its segment, where that was not kept or done."""
    lacking = set(program.segments.values())

    def complete(block: Run) -> None:
        segment = program.segments.get(id(block))
        if segment is not None and segment in lacking:
            lacking.remove(segment)
            machine.compute_again(segment)

    return complete
