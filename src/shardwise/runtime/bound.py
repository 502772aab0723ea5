"""A program that knows its modules, messages and functions: made once, for all its passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from shardwise.comm import About, Communicator
from shardwise.comm.exchange import Delivery, Wait
from shardwise.geometry.transfer import Transfer
from shardwise.graph.layer_graph import LayerGraph
from shardwise.operators import STRATEGIES, Gradients, Local
from shardwise.plans.program import Cut, Move, Op, Program, Run, to_all
from shardwise.runtime.cutting import Cutter
from shardwise.runtime.lowering import BlockFunction, Types, Weight, lower

Blocks = Mapping[int, BlockFunction]  # by the id of their Run


@dataclass(eq=False)
class Bound:
    """A program with all that its passes look up; it outlives every one of them."""

    program: Program
    graph: LayerGraph
    comm: Communicator
    modules: Mapping[str, Any]
    chunks: tuple[Any, Any] | None = None  # for what gradients were packed last, and how
    # Gradients of some parameters that are computed when they are due: names, and how.
    late: list[tuple[list[str], Gradients]] = field(default_factory=list)
    _blocks: dict[Any, Blocks] = field(default_factory=dict)
    _reached: dict[frozenset[str], Any] = field(default_factory=dict)

    def blocks(self, types: Types) -> Blocks:
        """The functions that this program's blocks are, for values of these types."""
        key = types.precision, types.device
        if key not in self._blocks:
            self._blocks[key] = {
                id(step): lower(step, types, partial(self._share, types), self._weight, self._at)
                for step in self.program.forward
                if isinstance(step, Run)
            }
        return self._blocks[key]

    def _weight(self, source: Any) -> Weight:
        constants, layouts = self.graph.constants, self.program.params
        return Weight.of(source, self.modules, constants, layouts, self.comm.rank)

    def _at(self, layer: str) -> None:
        self.comm.timeline.place = layer

    def _share(self, types: Types, op: Op) -> Local:
        """The op's share, with the communication and the module that it may ask for."""
        name, late = op.local.layer.name, self.late
        path = op.local.layer.traits.module
        params = [source.name for source in op.operands if source.kind == "param"]
        return replace(
            op.local,
            device=types.device,
            module=self.modules.get(path) if path is not None else None,
            sum=None if op.sums is None else _sum(op.sums, self.comm, f"{name} statistics"),
            gather=tuple(_gather(each, self.comm, f"{name} gathered") for each in op.gathers),
            later=lambda gradients: late.append((params, gradients)),
        )

    # -- messages ------------------------------------------------------------------------------

    @cached_property
    def forth(self) -> dict[str, Delivery]:
        """What every move does, by what it makes."""
        moves = (step for step in self.program.forward if isinstance(step, Move))
        rank = self.comm.rank
        return {m.target: Delivery.of(m.transfer, rank, About(m.target)) for m in moves}

    @cached_property
    def back(self) -> dict[str, Delivery]:
        """What every move does with the gradient of what it made."""
        moves = (step for step in self.program.backward if isinstance(step, Move))
        return {
            m.target: Delivery.of(
                m.transfer.transpose, self.comm.rank, About(f"{m.source} gradient")
            )
            for m in moves
        }

    @cached_property
    def out(self) -> dict[str, Delivery]:
        """What gives every rank the whole of every output."""
        layouts, rank = self.program.layouts, self.comm.rank
        return {
            name: Delivery.of(to_all(layouts[name]), rank, About(f"{name} to all"))
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

    def reached(self, outputs: Collection[str]) -> tuple[set[str], set[str]]:
        """The layers, and the parameters, with a gradient where a loss depends on these outputs."""
        key = frozenset(outputs)
        if key not in self._reached:
            self._reached[key] = reached(self.graph, [self.program.origins[o] for o in key])
        return self._reached[key]


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


def _sum(
    transfer: Transfer, comm: Communicator, name: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape = transfer.source[comm.rank].shape
    delivery = Delivery.of(transfer, comm.rank, About(name, "statistics"))
    return lambda x: delivery.begin(x.reshape(shape), comm)().view(x.shape)
