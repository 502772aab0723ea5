"""A program that knows its modules, messages and functions: made once, for all its passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from shardwise.comm import About, Communicator
from shardwise.comm.exchange import Delivery
from shardwise.geometry.box import Box
from shardwise.geometry.transfer import Slices, Transfer
from shardwise.graph.layer_graph import LayerGraph
from shardwise.operators import STRATEGIES, Gradients, Local
from shardwise.plans.program import TO_WHOM, Cut, Move, Op, Program, Run, Step, handed_out
from shardwise.runtime.compiling import CompiledBlock
from shardwise.runtime.cutting import Cutter
from shardwise.runtime.lowering import BlockFunction, Types, Weight, lower
from shardwise.runtime.recomputing import Total, Totals
from shardwise.tensors import Wait

Blocks = Mapping[int, BlockFunction]  # by the id of their Run


@dataclass(frozen=True)
class Reached:
    """What a loss depends on, the same on all ranks but for values that a rank has nothing of."""

    positions: frozenset[int]  # steps of the backward pass
    params: frozenset[str]
    empty: frozenset[str]  # values of layers in whose sums this rank takes part for others


@dataclass(eq=False)
class Bound:
    """A program with all that its passes look up; it outlives every one of them."""

    program: Program
    graph: LayerGraph
    comm: Communicator
    modules: Mapping[str, Any]
    chunks: tuple[Any, Any] | None = None  # for what gradients were packed last, and how
    # Gradients of some parameters that are computed when they are due: names, and how.
    delayed: list[tuple[list[str], Gradients]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    _blocks: dict[Any, Any] = field(default_factory=dict)
    _deliveries_out: dict[str, dict[str, Delivery]] = field(default_factory=dict)
    _reached: dict[frozenset[str], Reached] = field(default_factory=dict)

    def blocks(self, types: Types) -> Blocks:
        """The functions that this program's blocks are, for values of these types."""
        key = types.autocast, types.device
        if key not in self._blocks:
            self._blocks[key] = {
                id(step): lower(step, types, partial(self._share, types), self._weight, self._at)
                for step in self.program.forward
                if isinstance(step, Run)
            }
        return self._blocks[key]

    def compiled(self, types: Types, mode: str) -> Mapping[int, CompiledBlock]:
        """The same, compiled by torch.compile."""
        key = types.autocast, types.device, "compiled"
        if key not in self._blocks:
            blocks = self.blocks(types)
            self._blocks[key] = {run: CompiledBlock(block, mode) for run, block in blocks.items()}
        return self._blocks[key]

    def _weight(self, source: Any) -> Weight:
        constants, layouts = self.graph.constants, self.program.params
        return Weight.of(source, self.modules, constants, layouts, self.comm.rank)

    def _at(self, layer: str) -> None:
        self.comm.timeline.place = layer

    def _share(self, types: Types, op: Op) -> Local:
        """The op's share, with the communication and the module that it may ask for."""
        name, delayed = op.local.layer.name, self.delayed
        params = [source.name for source in op.operands if source.kind == "param"]
        path = op.local.layer.traits.module
        return replace(
            op.local,
            device=types.device,
            module=None if path is None else self.modules.get(path),
            sum=None if op.sums is None else self._sum(op.sums, f"{name} statistics"),
            gather=tuple(_gather(each, self.comm, f"{name} gathered") for each in op.gathers),
            later=lambda gradients: delayed.append((params, gradients)),
        )

    def _sum(self, transfer: Transfer, name: str) -> Total:
        shape, comm = transfer.source[self.comm.rank].shape, self.comm
        delivery = Delivery.of(transfer, comm.rank, About(name, "statistics"))
        return self.totals.of(lambda x: delivery.begin(x.reshape(shape), comm)().view(x.shape))

    # -- messages ------------------------------------------------------------------------------

    @cached_property
    def deliveries(self) -> dict[str, Delivery]:
        """What every move does, by what it makes."""
        moves = (step for step in self.program.forward if isinstance(step, Move))
        rank = self.comm.rank
        return {m.target: Delivery.of(m.transfer, rank, About(m.target)) for m in moves}

    @cached_property
    def deliveries_back(self) -> dict[str, Delivery]:
        """What every move does with the gradient of what it made."""
        moves = (step for step in self.program.backward if isinstance(step, Move))
        return {
            m.target: Delivery.of(
                m.transfer.transpose, self.comm.rank, About(f"{m.source} gradient")
            )
            for m in moves
        }

    def deliveries_out(self, output: str) -> dict[str, Delivery]:
        """What gives the user the outputs, where they move at all."""
        if output not in self._deliveries_out:
            moves = {n: handed_out(self.program.layouts[n], output) for n in self.program.outputs}
            self._deliveries_out[output] = {
                name: Delivery.of(transfer, self.comm.rank, About(f"{name} {TO_WHOM[output]}"))
                for name, transfer in moves.items()
                if transfer is not None
            }
        return self._deliveries_out[output]

    @cached_property
    def own_parts(self) -> dict[str, Slices]:
        """Where this rank's part of every output lies in the whole."""
        boxes, layouts = self.program.boxes, self.program.layouts
        return {
            name: boxes[name].slices_in(Box.whole(layouts[name].shape))
            for name in self.program.outputs
        }

    @cached_property
    def cutters(self) -> dict[str, Cutter]:
        """What every cut does, by what it makes."""
        boxes, layouts = self.program.boxes, self.program.layouts
        return {
            step.target: Cutter.of(layouts[step.source].shape, boxes[step.target], step.need.fill)
            for step in self.program.forward
            if isinstance(step, Cut)
        }

    @cached_property
    def counting(self) -> list[Any]:
        """The modules that count the batches they have seen."""
        layers = [each for each in self.graph.layers if STRATEGIES[each.op].counts_batches]
        paths = [layer.traits.module for layer in layers]
        return [self.modules[path] for path in paths if path is not None]

    # -- gradients -----------------------------------------------------------------------------

    def reached(self, outputs: Collection[str]) -> Reached:
        """What has a gradient where a loss depends on these outputs."""
        key = frozenset(outputs)
        if key not in self._reached:
            origins = self.program.origins
            layers, params = reached(self.graph, [origins[name] for name in key])
            positions = frozenset(
                position
                for position, step in enumerate(self.program.backward)
                if not layers.isdisjoint(_layers_of(step, origins))
            )
            joined = (n for n, layer in self.program.sums_for_others.items() if layer in layers)
            self._reached[key] = Reached(positions, frozenset(params), frozenset(joined))
        return self._reached[key]


def _layers_of(step: Step, origins: Mapping[str, str]) -> list[str]:
    if isinstance(step, Run):
        return [op.local.layer.name for op in step.ops]
    return [origins[step.target]]


def reached(graph: LayerGraph, outputs: Collection[str]) -> tuple[set[str], set[str]]:
    """The layers, and the parameters, that have a gradient where a loss depends on these layers."""
    layers, params = set(outputs), set()
    for layer in reversed(graph.layers):
        numbers = layer.dtype.is_floating_point or layer.dtype.is_complex
        if layer.name in layers and numbers and not STRATEGIES[layer.op].ends_gradient(layer):
            layers.update(layer.inputs)
            params.update(layer.params)
    return layers, params


def _gather(transfer: Transfer, comm: Communicator, name: str) -> Callable[[torch.Tensor], Wait]:
    delivery = Delivery.of(transfer, comm.rank, About(name, "gradients"))
    return lambda x: delivery.begin(x, comm)
