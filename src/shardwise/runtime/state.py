"""What a parallel model knows beyond its modules: its graphs, programs, layouts and sums."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from inspect import Signature
from typing import Any

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.attributes import Attributes, Looks
from shardwise.model.capture import Graphs, Kinds, ModelGraphs
from shardwise.modules import named_tensors
from shardwise.plans.compile import compile_program
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.plans.program import Program, check_held, param_layouts
from shardwise.runtime.bound import Bound
from shardwise.runtime.gradient_sums import (
    Buffers,
    Chunks,
    DelayedGradients,
    EngineChoice,
    GradientSums,
)
from shardwise.runtime.interpreter import Tensors
from shardwise.runtime.uninitialized import Uninitialized
from shardwise.runtime.wrapping import Watch

MOST_PROGRAMS = 8  # that are kept: a model may be given any number of batch sizes
PRECISIONS = {None: None, "bf16": torch.bfloat16}


class State:
    """What a parallel model knows beyond its modules: graphs, programs, layouts and sums.

    It holds the model's tables of tensors, not the model itself, which would keep both alive.
    """

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
        self.lane = comm.in_lane("gradients")
        graph = graphs(True, plan.inputs[0][0])
        plan.check(graph)
        self.facts = {"plan": plan.to_json(), "model": graph.signature}  # the same on all ranks
        self._prepared: set[tuple[int, ...]] = set()  # groups of ranks that can talk
        self._engines = engine.choices(sum(1 for layer in graph.layers if layer.params))
        self.layouts = param_layouts(graph, plan)
        self.arguments = Signature()  # of the model's forward
        self.attributes: Any = None
        self._begin()

    def _begin(self) -> None:
        """Nothing is under way, and no pass has been made."""
        self.choice = EngineChoice(self._engines, self.comm)
        self.watch: Watch | None = None
        self.holds = False  # sums of gradients are left for later: no_sync()
        self.buffers = Buffers()
        self.unfinished: GradientSums | None = None  # sums that optimizers will wait for
        self.late = DelayedGradients()  # gradients that wait for an optimizer that delays updates
        self.settle: Callable[[frozenset[str] | None], None] | None = None  # the optimizer's
        self._bound: dict[Any, Bound] = {}  # the last used is last
        self.modules: dict[str, Any] = {}
        self.name = "model"  # of the original's class
        self._places: list[tuple[str, str, dict[str, nn.Parameter | None]]] = []
        self.blanks = Uninitialized({}, unchecked=False)

    def adopt(self, root: nn.Module) -> None:
        """Takes note of the modules of the model that this is about."""
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self.name = type(root).__name__.removeprefix("Parallel")
        self._places = [
            (name, name.rpartition(".")[2], self.modules[name.rpartition(".")[0]]._parameters)
            for name, _ in root.named_parameters()
        ]
        self.modules[""] = weakref.proxy(root)
        reads = self.graph.reads if isinstance(self.graph, ModelGraphs) else {}
        base = self.attributes and self.attributes.base
        self.attributes = Attributes(self.modules, reads, base)

    def twin(self) -> State:
        """The same, for a copy of the model."""
        twin = copy.copy(self)
        twin._begin()
        return twin

    @property
    def training(self) -> bool:
        return self.modules[""].training

    @cached_property
    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's blocks."""
        return {name: layout[self.comm.rank].shape for name, layout in self.layouts.items()}

    def params(self) -> dict[str, nn.Parameter]:
        """The same as named_parameters, without a walk over all modules, which every step needs."""
        found = ((name, table[leaf]) for name, leaf, table in self._places)
        return {name: param for name, param in found if param is not None}

    # -- tensors without values ----------------------------------------------------------------

    def check_values(self) -> None:
        """Raises on all ranks where a tensor has no values yet; all ranks come here together."""
        if self.blanks:
            self.blanks.check(self._tensors(), self.comm)

    @contextmanager
    def keeping_uninitialized(self, copied: State | None = None) -> Iterator[None]:
        """What has no values has none afterwards either, though its tensors become others.

        These are of the same model, or of a copy of it.
        """
        blank = self.blanks.left(self._tensors()) if self.blanks else None
        yield
        if blank is not None:
            twin = copied or self
            own = twin._tensors()
            twin.blanks = Uninitialized({name: own[name] for name in blank})

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(named_tensors(self.modules[""]))

    # -- graphs --------------------------------------------------------------------------------

    def graph_for(
        self, inputs: tuple[torch.Tensor, ...], samples: int, stored: Mapping[str, torch.Tensor]
    ) -> LayerGraph:
        """The graph of the next pass: its layers' types depend on what the model is given."""
        if not isinstance(self.graph, ModelGraphs):
            return self.graph(self.training, samples)
        kinds = Kinds.of(inputs, stored)
        return self.graph.typed(self.training, samples, kinds, self.looks())

    def looks(self) -> Looks:
        """How modules differ, in what forward reads, from those that were made parallel."""
        return self.attributes.looks()

    # -- programs ------------------------------------------------------------------------------

    def bound(
        self, graph: LayerGraph, trainable: frozenset[str], whole: bool, gradient: bool
    ) -> Bound:
        """The program for this graph; those that were used last are kept."""
        key = (graph, trainable, whole, gradient)
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
        return Bound(program, graph, self.comm, self.modules)

    def prepare(self, program: Program) -> None:
        """Makes the process groups that a program needs; all ranks come here together."""
        if not self._prepared.issuperset(program.groups):
            self.comm.prepare(program.groups)
            segments = {ranks for layout in program.params.values() for ranks in layout.segments}
            self.lane.prepare(sorted(segments))
            self._prepared |= set(program.groups)

    # -- gradients -----------------------------------------------------------------------------

    def gradient_sums(self, bound: Bound, params: Tensors, held: bool) -> GradientSums:
        """The sums of a backward pass; where they are packed is decided once per program."""
        kinds = tuple((param.dtype, param.device) for param in params.values())
        key = (self.choice.engine, kinds)
        if bound.chunks is None or bound.chunks[0] != key:
            found = Chunks.of(bound.program, params, self.choice.engine, self.comm.rank)
            bound.chunks = key, found
        chunks = bound.chunks[1]
        return GradientSums(chunks, self.buffers.take(chunks), params, self.lane, held)

    def wait_for_sums(self, params: Collection[int] | None = None) -> None:
        """Waits for sums that go on after backward, of parameters with these ids or of all."""
        sums = self.unfinished
        if sums is not None:
            named = self.params().items()
            wanted = None if params is None else {n for n, p in named if id(p) in params}
            sums.wait(wanted)
            sums.check_untouched(wanted)
            if not sums.pending and not sums.handed:
                self.unfinished = None

    def settle_used(self, names: tuple[str, ...]) -> None:
        """Makes the updates of these weights that were put off until their next use."""
        for name in names:
            if self.settle is not None and self.late.entries and name in self.late.names:
                self.settle(frozenset([name]))

    def flush(self) -> None:
        """Computes gradients and makes updates that were put off, see `shardwise.optimizer`."""
        self.wait_for_sums()
        if self.settle is not None:
            self.settle(None)
