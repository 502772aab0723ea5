"""The programs of a parallel model: compiled and bound when they are first needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.comm import Communicator
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.attributes import Attributes, Looks
from shardwise.model.capture import Graphs, Kinds, ModelGraphs
from shardwise.model.torch_export import Sizes
from shardwise.plans.compile import compile_program
from shardwise.plans.moved_weights import with_moved_weights
from shardwise.plans.plan import Plan
from shardwise.plans.program import check_held
from shardwise.plans.uncollected import uncollected
from shardwise.runtime.bound import Bound

MOST_PROGRAMS = 8  # that are kept: a model may be given inputs of any number of sizes


class Programs:
    """What a model runs for inputs of one size, a mode and types: graphs, and a rank's programs."""

    def __init__(
        self, plan: Plan, graphs: Graphs, layouts: Mapping[str, Layout], comm: Communicator
    ) -> None:
        self.plan, self.graph, self.layouts, self.comm = plan, graphs, layouts, comm
        self._modules: Mapping[str, Any] = {}
        self._bound: dict[Any, Bound] = {}  # the last used is last
        self._attributes: Any = None

    def adopt(self, modules: Mapping[str, Any], copied: Programs | None = None) -> None:
        """Takes note of the modules whose programs these are, which may be a copy of others."""
        reads = self.graph.reads if isinstance(self.graph, ModelGraphs) else {}
        base = copied._attributes.base if copied is not None else None
        self._modules, self._attributes = modules, Attributes(modules, reads, base)

    @property
    def num_kept(self) -> int:
        return len(self._bound)

    def looks(self) -> Looks:
        """How modules differ, in what forward reads, from those that were made parallel."""
        return self._attributes.looks()

    def graph_for(self, kinds: Kinds, sizes: Sizes) -> LayerGraph:
        """The graph of the next pass: its layers' types depend on what the model is given."""
        training = self._modules[""].training
        if not isinstance(self.graph, ModelGraphs):
            return self.graph(training, sizes)
        with uncollected():
            return self.graph.typed(training, sizes, kinds, self.looks())

    def bound(
        self, graph: LayerGraph, trainable: frozenset[str], whole: bool, gradient: bool
    ) -> Bound:
        """The program for this graph; those that were used last are kept."""
        key = (graph, trainable, whole, gradient)
        bound = self._bound.pop(key, None)
        if bound is None:
            with uncollected():
                bound = self._bind(*key)
        self._bound[key] = bound
        while len(self._bound) > MOST_PROGRAMS:
            del self._bound[next(iter(self._bound))]
        return bound

    def _bind(
        self, graph: LayerGraph, trainable: frozenset[str], whole: bool, gradient: bool
    ) -> Bound:
        graph = with_moved_weights(graph, self.plan, self.layouts, self._dtype)
        check_held(graph, self.plan, self.layouts)
        # Blocks stay where the plan's graph put them; what it does not know, every rank has.
        stored = (o for layer in graph.layers for o in layer.operands)
        others = {
            o.name: Layout.replicated(o.shape, self.comm.size)
            for o in stored
            if o.kind in ("param", "buffer") and o.name not in self.layouts
        }
        how = (trainable, whole, gradient, {**others, **self.layouts})
        program = compile_program(graph, self.plan, self.comm.rank, *how)
        return Bound(program, graph, self.comm, self._modules)

    def _dtype(self, name: str) -> torch.dtype:
        """Of a parameter."""
        path, _, leaf = name.rpartition(".")
        return getattr(self._modules[path], leaf).dtype
