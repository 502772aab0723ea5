"""From a graph and a plan to the program of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardwise.errors import PlanError
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Transfer
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES, Local, Need, Split
from shardwise.plans.plan import Plan
from shardwise.plans.program import (
    Cut,
    Move,
    Op,
    OperandSource,
    Program,
    Run,
    Step,
    differentiable,
    last_reads,
    layer_layout,
    param_layouts,
)


def compile_program(
    graph: LayerGraph,
    plan: Plan,
    rank: int,
    trainable: frozenset[str],
    whole_inputs: bool = True,
    inputs_need_gradient: bool = False,
    held: Mapping[str, Layout] | None = None,
) -> Program:
    """The steps of this rank; every rank compiles the same steps with its own boxes.

    `held` says where the blocks of stored tensors lie already, if they do.
    """
    inputs = whole_inputs, inputs_need_gradient
    params = param_layouts(plan, graph) if held is None else dict(held)
    return _Compiler(graph, plan, rank, trainable, *inputs, params).compile()


@dataclass
class _Compiler:
    graph: LayerGraph
    plan: Plan
    rank: int
    trainable: frozenset[str]
    whole_inputs: bool
    inputs_need_gradient: bool
    params: dict[str, Layout]

    def __post_init__(self) -> None:
        graph, inputs = self.graph, self.graph.inputs if self.inputs_need_gradient else ()
        self.configs = self.plan.configs(graph)
        self.segments = self.plan.segments(graph)
        self.layouts: dict[str, Layout] = {}
        self.dtypes = {layer.name: layer.dtype for layer in graph.layers}
        self.moves: dict[str, Move | Cut] = {}  # by target
        self.gathered: dict[tuple[str, Need], str] = {}
        self.differentiable = differentiable(graph, self.trainable, inputs)  # and moved copies

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
            frees=last_reads(forward, outputs),
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
        strategy = STRATEGIES[layer.op]
        config = self.configs[layer.name]
        split = Split.of(layer, config, self.plan.world)
        needs, partial = strategy.needs(split), strategy.partial(split)
        operands = tuple(
            self._source(operand.kind, operand.name, need)
            for operand, need in zip(layer.operands, needs, strict=True)
        )
        result = layer.name if partial is None else f"{layer.name}~"
        layout = self.layouts[layer.name] = strategy.output(split)
        if layer.name in self.differentiable:
            self.differentiable.add(result)
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
        draws = strategy.draws or layer.traits.draws
        announced = strategy.always_runs and 0 in layer.shape and self.rank in config.ranks
        active = not local.output.empty or draws or joins or announced
        without = tuple(i for i, operand in enumerate(layer.operands) if 0 in operand.shape)
        return Op(strategy, local, operands, result, active, total, gathers, without)

    def _trains(self, operands: tuple[OperandSource, ...]) -> bool:
        return any(s.kind == "param" and s.name in self.trainable for s in operands)

    def _source(self, kind: str, name: str, need: Need) -> OperandSource:
        if kind != "value":
            return OperandSource(kind, name, need.layout[self.rank])
        return OperandSource("value", self._gathered(name, need), need.layout[self.rank])

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
        of what the layer before it has made stays with that layer. What is computed again in
        backward does not mix with what is not.
        """
        groups: list[list[Op]] = []
        for op in ops:
            made = {earlier.result for earlier in groups[-1]} if groups else set()
            values = [s.name for s in op.operands if s.kind == "value"]
            moved = any(self._origin(value) in made for value in values if value in self.moves)
            begins = self.plan.world > 1 and (self._trains(op.operands) or op.sums is not None)
            apart = moved or (groups and self._segment(op) != self._segment(groups[-1][0]))
            if not groups or apart or (begins and not self._completes(op, groups[-1])):
                groups.append([])
            groups[-1].append(self._in_place(op, groups[-1], outputs))
        readers: dict[str, set[int]] = {}  # the places of the blocks that read a value
        for place, group in enumerate(groups):
            for source in (source for op in group for source in op.operands):
                readers.setdefault(source.name, set()).add(place)
        left = {move.source for move in self.moves.values()} | set(outputs)

        def outside(place: int) -> set[str]:
            made = {op.result for op in groups[place]}
            return {name for name in made if readers.get(name, set()) - {place}} | (made & left)

        return [self._run(group, outside(place)) for place, group in enumerate(groups)]

    def _segment(self, op: Op) -> int | None:
        return self.segments.get(op.local.layer.name)

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
        if not op.local.layer.traits.in_place or op.local.moved:
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

    def _run(self, group: list[Op], outside: set[str]) -> Run:
        """A block, of whose values others read those that are `outside` as well."""
        made = [op.result for op in group]
        read = [s.name for op in group for s in op.operands if s.kind == "value"]
        params = [s.name for op in group for s in op.operands if self._trains((s,))]
        outside = outside | {op.result for op in group if self._sums_for_others(op)}
        return Run(
            ops=tuple(group),
            inputs=tuple(dict.fromkeys(name for name in read if name not in made)),
            outputs=tuple(name for name in made if name in outside),
            params=tuple(dict.fromkeys(params)),
            segment=self._segment(group[0]),
        )

    def _sums_for_others(self, op: Op) -> bool:
        """Whether a rank takes part in the sums of a layer of whose output it has nothing.

        No gradient may come to it there then, and yet it has to take part on the way back.
        """
        if op.sums is None:
            return False
        joins, has = op.sums.source.numels > 0, self.layouts[op.result].numels > 0
        return bool((joins & ~has).any())

    # -- order ---------------------------------------------------------------------------------

    def _order(self, runs: list[Run], late: bool) -> tuple[Step, ...]:
        """Runs with the moves between them: right after their source, or before their reader."""
        steps: list[Step] = []
        placed: set[str] = set()

        def place(targets: Iterable[str]) -> None:
            for target in targets:
                if target in self.moves and target not in placed:
                    placed.add(target)
                    place([self.moves[target].source])
                    steps.append(self.moves[target])

        def place_copies(sources: Iterable[str]) -> None:
            for source in () if late else sources:
                place(target for target in self.moves if self._origin(target) == source)

        place_copies(self.graph.inputs)
        for run in runs:
            if late:
                place(run.inputs)
            steps.append(run)
            place_copies(run.outputs)
        place(self.moves)  # what only the user reads
        return tuple(steps)

    def _needs_backward(self, step: Step) -> bool:
        if isinstance(step, Run):
            return any(name in self.differentiable for name in step.outputs)
        return step.target in self.differentiable
