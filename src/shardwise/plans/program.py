"""From a graph and a plan to what one rank does, step by step.

A *value* is this rank's part of a tensor in one layout: the partition a layer produces (named like
the layer), a gathered version of it ("conv1>0"), or partial sums before they are added ("conv1~").
`Run` steps compute a block of layers, `Move` steps carry a value to another layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np
import torch

from shardwise.errors import PlanError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Transfer
from shardwise.graph.layer_graph import Layer, LayerGraph, Operand
from shardwise.operators import STRATEGIES, Local, Need, Split, Strategy
from shardwise.plans.plan import Plan


@dataclass(frozen=True)
class OperandSource:
    """Where an operand comes from: a value, or a stored tensor of which `box` is needed."""

    kind: str  # value, param, buffer, constant
    name: str
    box: Box


@dataclass(frozen=True)
class Op:
    """One layer on this rank."""

    strategy: Strategy
    local: Local
    operands: tuple[OperandSource, ...]
    result: str
    active: bool  # whether this rank has anything to do
    sums: Transfer | None = None  # of the statistics inside the layer
    gathers: tuple[Transfer, ...] = ()  # for the gradient of the weights
    without: tuple[int, ...] = ()  # operands that have no elements at all


@dataclass(frozen=True)
class Run:
    """A block of layers without transfers between them."""

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]  # values from outside
    outputs: tuple[str, ...]  # values that others read
    params: tuple[str, ...]
    segment: int | None = None  # that is computed again, see `Segment`


@dataclass(frozen=True)
class Move:
    """A value carried to another layout."""

    source: str
    target: str
    transfer: Transfer


@dataclass(frozen=True)
class Cut:
    """A part cut out of an input that every rank has whole."""

    source: str
    target: str
    need: Need


Step = Run | Move | Cut


def last_reads(steps: Sequence[Step], outputs: Iterable[str] = ()) -> tuple[tuple[str, ...], ...]:
    """For every step, the values that are read there for the last time."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        is_run = isinstance(step, Run)
        used = (*step.inputs, *step.outputs) if is_run else (step.source, step.target)
        last |= dict.fromkeys(used, index)
    for name in outputs:
        last.pop(name, None)
    frees: list[list[str]] = [[] for _ in steps]
    for name, index in last.items():
        frees[index].append(name)
    return tuple(map(tuple, frees))


@dataclass(frozen=True, eq=False)
class Segment:
    """Blocks that the backward pass computes again, and the moves that need nobody else then."""

    steps: tuple[Run | Move, ...]  # in the order of the forward pass
    inputs: frozenset[str]  # values from elsewhere, which are kept

    @cached_property
    def frees(self) -> tuple[tuple[str, ...], ...]:
        """For every step, the values that no step after it reads."""
        return last_reads(self.steps)

    @classmethod
    def of(cls, runs: list[Run], steps: tuple[Step, ...]) -> Segment:
        """A moved value is put together again from this rank's own part, where that is known."""
        moves = {step.target: step for step in steps if isinstance(step, Move)}
        made = {name for run in runs for name in run.outputs}
        read = {name for run in runs for name in run.inputs} - made
        known, repeated = made | (read - moves.keys()), set[str]()

        def can_repeat(name: str) -> bool:
            if name in known:
                return True
            if name not in moves or not can_repeat(moves[name].source):
                return False
            repeated.add(name)
            return True

        inputs = frozenset(name for name in read if name not in moves or not can_repeat(name))
        own = {id(run) for run in runs} | {id(moves[name]) for name in repeated}
        taken = (step for step in steps if id(step) in own and not isinstance(step, Cut))
        return cls(tuple(taken), inputs)


@dataclass(frozen=True)
class Program:
    """What one rank does for one batch size and mode.

    Moves stand as early as possible in both directions, so that they overlap with computation:
    right after their source in `forward`, right after their last reader's backward in `backward`.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]  # in the order of the backward pass
    layouts: dict[str, Layout]  # of every value
    boxes: dict[str, Box]  # of every value, on this rank
    params: dict[str, Layout]  # where the blocks of stored tensors lie
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: dict[str, torch.dtype]  # of every value
    scalars: frozenset[str]  # outputs without dimensions, which are one element until returned
    frees: tuple[tuple[str, ...], ...]  # values that no step after this one reads
    differentiable: frozenset[str]  # values that depend on what is trained
    gathered: frozenset[str]  # parameters whose gradient every rank computes whole
    whole_inputs: bool  # whether every rank is given the whole inputs, or each its own part

    @cached_property
    def recorded(self) -> frozenset[int]:
        """The blocks (by id) that the backward pass visits: others need not keep what they met."""
        return frozenset(id(step) for step in self.backward if isinstance(step, Run))

    @cached_property
    def segments(self) -> dict[int, Segment]:
        """What is computed again, by the id of each of its blocks."""
        runs: dict[int, list[Run]] = {}
        for step in self.forward:
            if isinstance(step, Run) and step.segment is not None and id(step) in self.recorded:
                runs.setdefault(step.segment, []).append(step)
        found = [(own, Segment.of(own, self.forward)) for own in runs.values()]
        return {id(run): segment for own, segment in found for run in own}

    @cached_property
    def repeated(self) -> dict[str, list[Segment]]:
        """The moved values that segments put together again, by name."""
        found: dict[str, list[Segment]] = {}
        for segment in dict.fromkeys(self.segments.values()):
            for step in segment.steps:
                if isinstance(step, Move):
                    found.setdefault(step.target, []).append(segment)
        return found

    @cached_property
    def sums_for_others(self) -> dict[str, str]:
        """Values that this rank has nothing of, and the layers that sum statistics for them."""
        ops = [op for step in self.backward if isinstance(step, Run) for op in step.ops]
        return {
            op.result: op.local.layer.name
            for op in ops
            if op.sums is not None and op.local.output.empty
        }

    @cached_property
    def origins(self) -> dict[str, str]:
        """The layer (or input) that every value is the output of, moved or not."""
        found = {name: name for name in self.inputs}
        for step in self.forward:
            if isinstance(step, Run):
                found |= {op.result: op.local.layer.name for op in step.ops}
            else:
                found[step.target] = found[step.source]
        return found

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that run collectives, in an order that every rank agrees on."""
        ops = [op for run in self.forward if isinstance(run, Run) for op in run.ops]
        transfers = [step.transfer for step in self.forward if isinstance(step, Move)]
        transfers += [t.transpose for t in transfers]
        transfers += [op.sums for op in ops if op.sums]
        transfers += [gather for op in ops for gather in op.gathers]
        outputs = [handed_out(self.layouts[name], "full") for name in self.outputs]
        transfers += [transfer for transfer in outputs if transfer is not None]
        groups = {group for transfer in transfers for group in transfer.groups}
        groups |= {group for layout in self.params.values() for group in layout.segments}
        return tuple(sorted(groups))


def layer_layout(graph: LayerGraph, plan: Plan, name: str) -> Layout:
    """Where the parts of a layer's output lie; of an input, which part each rank is given."""
    layer = graph[name]
    return STRATEGIES[layer.op].output(Split.of(layer, plan.config(layer, graph), plan.world))


def differentiable(
    graph: LayerGraph, trained: Set[str], inputs: Iterable[str] = (), of_any_type: bool = False
) -> set[str]:
    """Layers to which gradients flow back: what they make depends on what is trained, or on inputs.

    Whole numbers have no gradient; the costs of plans overlook that (`of_any_type`).
    """
    found = set(inputs)
    for layer in graph.layers:
        flows = of_any_type or layer.dtype.is_floating_point or layer.dtype.is_complex
        depends = not (trained.isdisjoint(layer.params) and found.isdisjoint(layer.inputs))
        if depends and flows and not STRATEGIES[layer.op].ends_gradient(layer):
            found.add(layer.name)
    return found


OUTPUTS = ("full", "local", "one")  # whole on every rank, a part on each, whole on rank 0
TO_WHOM = {"full": "to all", "one": "to rank 0"}


def handed_out(layout: Layout, output: str) -> Transfer | None:
    """How the user gets an output; None where every rank keeps its part."""
    if output == "local":
        return None
    ranks = range(layout.world) if output == "full" else (0,)
    return Transfer(layout, Layout.on(layout.shape, layout.world, ranks))


def param_layouts(plan: Plan, *graphs: LayerGraph) -> dict[str, Layout]:
    """Where the blocks of every parameter and buffer lie, for all these graphs of a model.

    Blocks are those that the layers need. A tensor that is needed in overlapping parts (shared by
    layers with different configs, or split in another way for larger images), or not all of it, is
    kept whole on all ranks that use any of it. A scalar has no block that could be empty, so every
    rank keeps it, as all do with what nobody uses.
    """
    uses: dict[str, list[Layout]] = {}
    layers = [layer for graph in graphs for layer in graph.layers]
    scalars = {o.name for layer in layers for o in layer.operands if o.scalar}
    for graph in graphs:
        for _, operand, layout in stored_needs(graph, plan):
            uses.setdefault(operand.name, []).append(layout)
    layouts = {}
    for name, needed in uses.items():
        first = needed[0]
        if name in scalars:
            layouts[name] = Layout.replicated(first.shape, plan.world)
        elif all(layout == first for layout in needed) and _is_all_there(first):
            layouts[name] = first
        else:
            users = np.flatnonzero(np.any([layout.numels > 0 for layout in needed], axis=0))
            ranks = users.tolist() or range(plan.world)
            layouts[name] = Layout.on(first.shape, plan.world, ranks)
    return layouts


@lru_cache(maxsize=4096)
def _is_all_there(layout: Layout) -> bool:
    """Whether ranks hold the same block or disjoint ones, and every element is in one of them."""
    return layout.is_segmented and layout.owners().numels.sum() == prod(layout.shape)


def check_held(graph: LayerGraph, plan: Plan, held: Mapping[str, Layout]) -> None:
    """Raises where a rank would need a part of a stored tensor that it does not hold."""
    for layer, operand, layout in stored_needs(graph, plan):
        name = operand.name
        if name in held and not layout.is_within(held[name]):
            mode = "training" if graph.training else "evaluation"
            sizes = ", ".join("x".join(map(str, graph[each].shape)) for each in graph.inputs)
            raise PlanError(
                f"layer {layer.name!r} of {mode} needs {name!r} split in another way, for inputs "
                f"of {sizes}, than the layers that the plan was made for, which hold it; use it as "
                "they do, plan for such inputs as well, or give the layers that use it a split "
                "that keeps it whole"
            )


def stored_needs(graph: LayerGraph, plan: Plan) -> Iterator[tuple[Layer, Operand, Layout]]:
    """Every use of a stored tensor: by which layer, and which part each rank needs."""
    configs = plan.configs(graph)
    for layer in graph.layers:
        split = Split.of(layer, configs[layer.name], plan.world)
        needs = STRATEGIES[layer.op].needs(split)
        for operand, need in zip(layer.operands, needs, strict=True):
            if operand.kind in ("param", "buffer"):
                yield layer, operand, need.layout
