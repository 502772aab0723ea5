"""From a graph and a plan to what one rank does, step by step.

A *value* is this rank's part of a tensor in one layout: the partition a layer produces (named like
the layer), a gathered version of it ("conv1>0"), or partial sums before they are added ("conv1~").
`Run` steps compute a block of layers, `Move` steps carry a value to another layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from shardwise.errors import PlanError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Transfer
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import Local, Need, Split, Strategy, strategy_of
from shardwise.plans.plan import Plan


@dataclass(frozen=True)
class Source:
    """Where an operand comes from: a value, or a stored tensor of which `box` is needed."""

    kind: str  # value, param, buffer, constant
    name: str
    box: Box


@dataclass(frozen=True)
class Op:
    """One layer on this rank."""

    strategy: Strategy
    local: Local
    operands: tuple[Source, ...]
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
        transfers += [to_all(self.layouts[name]) for name in self.outputs]
        groups = {group for transfer in transfers for group in transfer.groups}
        groups |= {group for layout in self.params.values() for group in layout.segments}
        return tuple(sorted(groups))


def layer_layout(graph: LayerGraph, plan: Plan, name: str) -> Layout:
    """Where the parts of a layer's output lie; of an input, which part each rank is given."""
    layer = graph[name]
    return strategy_of(layer).output(Split.of(layer, plan.config(layer, graph), plan.world))


def to_all(layout: Layout) -> Transfer:
    """The transfer that gives every rank the whole tensor."""
    return Transfer(layout, Layout.replicated(layout.shape, layout.world))


def param_layouts(graph: LayerGraph, plan: Plan) -> dict[str, Layout]:
    """Where the blocks of every parameter and buffer lie.

    Blocks are those that the layers need. A tensor that is needed in overlapping parts (shared by
    layers with different configs, say) is kept whole on all ranks that use any of it. A scalar has
    no block that could be empty, so every rank keeps it.
    """
    uses: dict[str, list[Layout]] = {}
    scalars = {o.name for layer in graph.layers for o in layer.operands if o.scalar}
    for _, name, layout in _stored_needs(graph, plan):
        uses.setdefault(name, []).append(layout)
    layouts = {}
    for name, needed in uses.items():
        first = needed[0]
        if name in scalars:
            layouts[name] = Layout.replicated(first.shape, plan.world)
        elif all(layout == first for layout in needed) and first.is_segmented:
            layouts[name] = first
        else:
            users = np.any([layout.numels > 0 for layout in needed], axis=0)
            layouts[name] = Layout.on(first.shape, plan.world, np.flatnonzero(users).tolist())
    return layouts


def check_held(graph: LayerGraph, plan: Plan, held: Mapping[str, Layout]) -> None:
    """Raises where a rank would need a part of a stored tensor that it does not hold."""
    for layer, name, layout in _stored_needs(graph, plan):
        if name in held and not layout.is_within(held[name]):
            mode = "training" if graph.training else "evaluation"
            raise PlanError(
                f"layer {layer.name!r} of {mode} needs {name!r} split in another way than the "
                f"plan's layers do, which hold it; use it in {mode} as in training, or give the "
                "layers that use it a split that keeps it whole"
            )


def _stored_needs(graph: LayerGraph, plan: Plan) -> Iterator[tuple[Layer, str, Layout]]:
    """Every use of a stored tensor: by which layer, and which part each rank needs."""
    for layer in graph.layers:
        split = Split.of(layer, plan.config(layer, graph), plan.world)
        needs = strategy_of(layer).needs(split)
        for operand, need in zip(layer.operands, needs, strict=True):
            if operand.kind in ("param", "buffer"):
                yield layer, operand.name, need.layout


def compile_program(
    graph: LayerGraph,
    plan: Plan,
    rank: int,
    trainable: frozenset[str],
    whole_inputs: bool = True,
    inputs_need_gradient: bool = False,
) -> Program:
    """The steps of this rank; every rank compiles the same steps with its own boxes."""
    return _Compiler(graph, plan, rank, trainable, whole_inputs, inputs_need_gradient).compile()


class _Compiler:
    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        rank: int,
        trainable: frozenset[str],
        whole_inputs: bool,
        inputs_need_gradient: bool,
    ) -> None:
        self.graph, self.plan, self.rank = graph, plan, rank
        self.trainable = trainable
        self.whole_inputs = whole_inputs
        self.params = param_layouts(graph, plan)
        self.layouts: dict[str, Layout] = {}
        self.dtypes = {layer.name: layer.dtype for layer in graph.layers}
        self.moves: dict[str, Move | Cut] = {}  # by target
        self.gathered: dict[tuple[str, Need], str] = {}
        self.differentiable: set[str] = set(graph.inputs) if inputs_need_gradient else set()

    def compile(self) -> Program:
        for name in self.graph.inputs:
            self.layouts[name] = layer_layout(self.graph, self.plan, name)
        ops = [self._op(layer) for layer in self.graph.layers if not layer.is_input]
        moved = {move.source for move in self.moves.values()}
        ops = [replace(op, local=replace(op.local, moved=op.result in moved)) for op in ops]
        outputs = tuple(self._output(name) for name in self.graph.outputs)
        runs = self._blocks(ops, outputs)
        forward = self._order(runs, late=False)
        late = self._order(runs, late=True)
        backward = tuple(step for step in reversed(late) if self._needs_backward(step))
        return Program(
            forward=forward,
            backward=backward,
            layouts=self.layouts,
            boxes={name: layout[self.rank] for name, layout in self.layouts.items()},
            params=self.params,
            inputs=self.graph.inputs,
            outputs=outputs,
            dtypes=self.dtypes,
            scalars=frozenset(
                value
                for value, name in zip(outputs, self.graph.outputs, strict=True)
                if self.graph[name].scalar
            ),
            frees=_frees(forward, outputs),
            differentiable=frozenset(self.differentiable),
            gathered=self._gathered_params(ops),
            whole_inputs=self.whole_inputs,
        )

    def _gathered_params(self, ops: list[Op]) -> frozenset[str]:
        """Parameters of layers that gather; one that another layer shares must be gathered too."""
        names = [(s.name, bool(op.gathers)) for op in ops for s in op.operands if s.kind == "param"]
        mixed = {name for name, gathers in names if gathers} & {n for n, g in names if not g}
        if mixed:
            raise PlanError(
                f"parameter {min(mixed)!r} is shared by layers, and only some of them have "
                "gradient 'gather'; give all of them the same"
            )
        return frozenset(name for name, gathers in names if gathers)

    # -- layers --------------------------------------------------------------------------------

    def _op(self, layer: Layer) -> Op:
        strategy = strategy_of(layer)
        config = self.plan.config(layer, self.graph)
        split = Split.of(layer, config, self.plan.world)
        needs, partial = strategy.needs(split), strategy.partial(split)
        operands = tuple(
            self._source(operand.kind, operand.name, need)
            for operand, need in zip(layer.operands, needs, strict=True)
        )
        result = layer.name if partial is None else f"{layer.name}~"
        layout = self.layouts[layer.name] = strategy.output(split)
        depends = self._trains(operands) or any(s.name in self.differentiable for s in operands)
        ends = strategy.ends_gradient(layer)
        if depends and not ends and (layer.dtype.is_floating_point or layer.dtype.is_complex):
            self.differentiable |= {layer.name, result}
        if partial is not None:
            self.layouts[result], self.dtypes[result] = partial, layer.dtype
            self.moves[layer.name] = Move(result, layer.name, Transfer(partial, layout))
            layout = partial
        sums = strategy.sums(split)
        box = sums[self.rank] if sums is not None else None
        local = Local(layer, config, layout[self.rank], tuple(s.box for s in operands), box)
        total = Transfer(sums, sums) if sums is not None else None
        gathers = tuple(Transfer(*layouts) for layouts in strategy.gathers(split))
        joins = (box is not None and not box.empty) or any(
            g.target.numels[self.rank] for g in gathers
        )
        draws = strategy.draws or layer.attrs.get("draws", False)
        announced = strategy.always_runs and 0 in layer.shape and self.rank in config.ranks
        active = not local.output.empty or draws or joins or announced
        without = tuple(i for i, operand in enumerate(layer.operands) if 0 in operand.shape)
        return Op(strategy, local, operands, result, active, total, gathers, without)

    def _trains(self, operands: tuple[Source, ...]) -> bool:
        return any(s.kind == "param" and s.name in self.trainable for s in operands)

    def _source(self, kind: str, name: str, need: Need) -> Source:
        if kind != "value":
            return Source(kind, name, need.layout[self.rank])
        return Source("value", self._gathered(name, need), need.layout[self.rank])

    def _gathered(self, name: str, need: Need) -> str:
        """The value of this tensor in the needed layout; the tensor's own if that is the same."""
        cut = self.whole_inputs and name in self.graph.inputs
        transfer = Transfer(self.layouts[name], need.layout, need.fill)
        if transfer.is_identity and not cut:
            return name
        key = (name, need)
        if key not in self.gathered:
            target = f"{name}>{sum(source == name for source, _ in self.gathered)}"
            self.gathered[key] = target
            self.layouts[target], self.dtypes[target] = need.layout, self.dtypes[name]
            self.moves[target] = Cut(name, target, need) if cut else Move(name, target, transfer)
            if name in self.differentiable:
                self.differentiable.add(target)
        return self.gathered[key]

    def _output(self, name: str) -> str:
        """The value that the user gets: of an input returned as it is, this rank's part."""
        if name not in self.graph.inputs:
            return name
        return self._gathered(name, Need(self.layouts[name]))

    # -- blocks --------------------------------------------------------------------------------

    def _blocks(self, ops: list[Op], outputs: tuple[str, ...]) -> list[Run]:
        """Consecutive layers join as long as nothing moves between them.

        A layer with weights begins a new block, so that its gradient is ready early. It keeps its
        input for the backward pass anyway, so the cut costs no memory. So does a layer with sums
        inside, of which a block has one at most: all ranks come to them in the same order. A norm
        of what the layer before it has made stays with that layer.
        """
        groups: list[list[Op]] = []
        for op in ops:
            made = {earlier.result for earlier in groups[-1]} if groups else set()
            values = [s.name for s in op.operands if s.kind == "value"]
            moved = any(self._origin(value) in made for value in values if value in self.moves)
            begins = self.plan.world > 1 and (self._trains(op.operands) or op.sums is not None)
            if not groups or moved or (begins and not self._completes(op, groups[-1])):
                groups.append([])
            groups[-1].append(self._in_place(op, groups[-1], outputs))
        return [self._run(group, groups, outputs) for group in groups]

    def _completes(self, op: Op, group: list[Op]) -> bool:
        """Whether a norm follows the one layer of a block that it normalises.

        Its own weights make ranks without samples take part in its sums in backward.
        """
        follows = len(group) == 1 and op.operands[0].name == group[0].result and not group[0].sums
        return follows and op.strategy.normalizes and self._trains(op.operands)

    def _in_place(self, op: Op, group: list[Op], outputs: tuple[str, ...]) -> Op:
        """Overwrites as the model does, where a layer of this block just made the operand.

        The stock model's in-place ReLU saves a pass over memory; without it one worker was slower.
        """
        if not op.local.attrs.get("in_place") or op.local.moved:
            return op
        target = op.operands[0].name
        maker = next((o for o in group if o.result == target), None)
        readers = self.graph.consumers.get(target, ())
        alone = readers == (op.local.layer.name,) and target not in outputs
        if maker is None or not alone or not maker.strategy.makes_new_tensor(maker.local.layer):
            return op
        return replace(op, local=replace(op.local, in_place=True))

    def _origin(self, value: str) -> str:
        """The value a block computed, from which this one was moved."""
        while value in self.moves:
            value = self.moves[value].source
        return value

    def _run(self, group: list[Op], groups: list[list[Op]], outputs: tuple[str, ...]) -> Run:
        made = [op.result for op in group]
        read = [s.name for op in group for s in op.operands if s.kind == "value"]
        outside = {
            s.name for other in groups if other is not group for op in other for s in op.operands
        }
        outside |= {move.source for move in self.moves.values()} | set(outputs)
        params = [s.name for op in group for s in op.operands if self._trains((s,))]
        return Run(
            ops=tuple(group),
            inputs=tuple(dict.fromkeys(name for name in read if name not in made)),
            outputs=tuple(name for name in made if name in outside),
            params=tuple(dict.fromkeys(params)),
        )

    # -- order ---------------------------------------------------------------------------------

    def _order(self, runs: list[Run], late: bool) -> tuple[Step, ...]:
        """Runs with the moves between them: right after their source, or before their reader."""
        steps: list[Step] = []
        placed: set[str] = set()

        def place(target: str) -> None:
            if target in placed or target not in self.moves:
                return
            placed.add(target)
            place(self.moves[target].source)
            steps.append(self.moves[target])

        def place_readers(source: str) -> None:
            for target, move in self.moves.items():
                if move.source == source and target not in placed:
                    placed.add(target)
                    steps.append(move)
                    place_readers(target)

        if not late:
            for name in self.graph.inputs:
                place_readers(name)
        for run in runs:
            if late:
                for name in run.inputs:
                    place(name)
            steps.append(run)
            if not late:
                for name in run.outputs:
                    place_readers(name)
        for target in self.moves:
            place(target)  # what only the user reads
        return tuple(steps)

    def _needs_backward(self, step: Step) -> bool:
        if isinstance(step, Run):
            return any(name in self.differentiable for name in step.outputs)
        return step.target in self.differentiable


def _frees(steps: tuple[Step, ...], outputs: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """For every step, the values that are read there for the last time."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Run):
            for name in (*step.inputs, *step.outputs):
                last[name] = index
        else:
            last[step.source] = last[step.target] = index
    for name in outputs:
        last.pop(name, None)
    frees: list[list[str]] = [[] for _ in steps]
    for name, index in last.items():
        frees[index].append(name)
    return tuple(map(tuple, frees))
