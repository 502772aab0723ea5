"""What a parallel model knows beyond its modules: its graphs, programs, layouts and sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.capture import Captured
from shardwise.comm import Communicator
from shardwise.engine import Engine
from shardwise.errors import ShardwiseError
from shardwise.gradients import Choice, GradientSums, Late
from shardwise.graph import LayerGraph
from shardwise.layout import Layout
from shardwise.plan import Plan
from shardwise.program import Program, check_held, compile_program, param_layouts
from shardwise.runtime import Bound, Tensors, Watch
from shardwise.stored import assign, copy_structure, named_tensors, weightless

Graphs = Callable[[bool, int], LayerGraph]  # from (training, batch) to the layer graph

MOST_PROGRAMS = 8  # that are kept: a model may be given any number of batch sizes
PRECISIONS = {None: None, "bf16": torch.bfloat16}


class ModelGraphs:
    """Captures a model in each mode when it is first needed, without keeping its weights."""

    def __init__(self, model: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> None:
        like = next(model.parameters(), torch.empty(0))
        self._inputs = tuple(
            torch.empty(shape, dtype=like.dtype, device=like.device) for shape in shapes
        )
        self._model = copy_structure(model)
        twins: dict[int, torch.Tensor] = {}  # by the tensor they stand for, so that ties stay
        for name, tensor in list(named_tensors(self._model)):
            if id(tensor) not in twins:
                twins[id(tensor)] = weightless(tensor)
            assign(self._model, name, twins[id(tensor)])
        self._captured: dict[bool, Captured] = {}

    def __call__(self, training: bool, batch: int) -> LayerGraph:
        if training not in self._captured:
            self._captured[training] = Captured(self._model, self._inputs, training)
        return self._captured[training].graph(batch)


class State:
    """What a parallel model knows beyond its modules: graphs, programs and layouts."""

    def __init__(
        self,
        plan: Plan,
        output: str,
        comm: Communicator,
        graphs: Graphs,
        engine: Engine,
        precision: str | None,
    ) -> None:
        if output not in ("full", "local"):
            raise ShardwiseError(f"output={output!r} must be 'full' or 'local'")
        if precision not in PRECISIONS:
            raise ShardwiseError(f"precision={precision!r} must be 'bf16', or None")
        self.plan, self.output, self.comm, self.graph = plan, output, comm, graphs
        self.precision = PRECISIONS[precision]
        self.watch: Watch | None = None
        self.lane = comm.in_lane("gradients")
        self._sums: dict[int, GradientSums] = {}  # by program
        self.unfinished: GradientSums | None = None  # sums that optimizers will wait for
        self.late = Late()  # gradients that wait for an optimizer that delays updates
        self.settle: Callable[[frozenset[str] | None], None] | None = None  # the optimizer's
        self.modules: dict[str, nn.Module] = {}
        self._bound: dict[Any, Bound] = {}  # the last used is last
        self.ready: set[Any] = set()  # which programs all ranks have agreed on
        graph = graphs(True, plan.inputs[0][0])
        self.agree(plan.to_json(), "was started with another plan than rank 0")
        self.agree(graph.signature, "was started with another model than rank 0")
        plan.check(graph)
        layers = sum(1 for layer in graph.layers if layer.params)
        self.choice = Choice(engine.choices(layers), comm)
        self._engine = self.choice.engine
        self.layouts = param_layouts(graph, plan)

    def gradient_sums(self, program: Program, params: Tensors) -> GradientSums:
        """The engine of this program; new buffers where parameters have changed their kind."""
        engine = self.choice.engine
        if engine != self._engine:  # another one is tried: the last one's buffers go
            self._engine, self._sums = engine, {}
        known = self._sums.get(id(program))
        if known is None or not known.fits(params):
            known = self._sums[id(program)] = GradientSums.of(program, params, engine, self.lane)
        return known

    def agree(self, value: str, otherwise: str) -> None:
        """Raises on every rank where some rank's value differs from rank 0's."""
        first, *others = self.comm.gather_objects(value)
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise ShardwiseError(f"rank {rank} {otherwise}")

    def bound(
        self, graph: LayerGraph, trainable: frozenset[str], whole: bool, gradient: bool
    ) -> Bound:
        """The program for this graph; those that were used last are kept."""
        key = (graph.training, graph.batch, trainable, whole, gradient)
        bound = self._bound.pop(key, None) or self._bind(graph, trainable, whole, gradient)
        self._bound[key] = bound
        while len(self._bound) > MOST_PROGRAMS:
            del self._bound[next(iter(self._bound))]
        return bound

    def _bind(
        self, graph: LayerGraph, trainable: frozenset[str], whole: bool, gradient: bool
    ) -> Bound:
        check_held(graph, self.plan, self.layouts)
        program = compile_program(graph, self.plan, self.comm.rank, trainable, whole, gradient)
        # Blocks stay where the training graph put them; what it does not know, every rank has.
        others = {
            name: Layout.replicated(layout.shape, layout.world)
            for name, layout in program.params.items()
            if name not in self.layouts
        }
        program = replace(program, params=others | self.layouts)
        return Bound(program, self.comm, self.modules)
