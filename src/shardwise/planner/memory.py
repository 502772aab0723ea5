"""The memory of workers: what they hold always, while a layer runs, and to move what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardwise.geometry.grid import Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.layer_costs import Training
from shardwise.plans.compile import compile_program
from shardwise.plans.plan import Plan
from shardwise.plans.program import Move, Program, Run, Segment

SLACK = 1.1  # what allocators and libraries add to the memory of tensors: up to a tenth, measured


@dataclass(frozen=True, eq=False)
class Memory:
    """What the layers of a graph take where it is trained like this, from numbers of elements."""

    graph: LayerGraph
    training: Training
    _known: dict[tuple[str, Config], tuple[np.ndarray, ...]] = field(default_factory=dict)

    def of(self, split: Split) -> tuple[np.ndarray, ...]:
        """Bytes per rank: of weights, kept for the backward pass, and those that come and go."""
        if (key := (split.layer.name, split.config)) not in self._known:
            self._known[key] = self._of(split)
        return self._known[key]

    def _of(self, split: Split) -> tuple[np.ndarray, ...]:
        layer, strategy = split.layer, STRATEGIES[split.layer.op]
        read = [need.layout.numels for need in strategy.needs(split)]
        partial, made = strategy.partial(split), strategy.output(split).numels
        stored, saved = self.stored(layer, read, made), np.zeros(len(made))
        if self.training.gradients:
            saved = self.saved(layer, read, made)
        both = 2.0 if self.training.gradients else 1.0  # gradients beside values
        working = self.working(layer, read, made if partial is None else partial.numels) * both
        if partial is not None:  # its parts as messages, and those of the others as they arrive
            working = working + 2.0 * partial.numels * self.training.itemsize
        return stored, saved, working

    def working(self, layer: Layer, read: Sequence[np.ndarray], made: np.ndarray) -> np.ndarray:
        """What a layer reads of other layers, and what it makes."""
        pairs = zip(layer.operands, read, strict=True)
        values = sum(each for operand, each in pairs if operand.kind == "value")
        return (values + made) * float(self.training.itemsize)

    def stored(self, layer: Layer, read: Sequence[np.ndarray], made: np.ndarray) -> np.ndarray:
        """Weights, their gradients and the optimizer's state, from the operands' elements."""
        copies = 2 + self.training.states if self.training.gradients else 1
        stored = np.zeros(len(made))
        for operand, count in zip(layer.operands, read, strict=True):
            if operand.kind != "value":
                stored += count * (copies if operand.kind == "param" else 1)
        return stored * self.training.itemsize

    def saved(self, layer: Layer, read: Sequence[np.ndarray], made: np.ndarray) -> np.ndarray:
        """What a layer keeps for the backward pass, of its operands and of its output."""
        strategy, saved = STRATEGIES[layer.op], np.zeros(len(made))
        if strategy.keeps(layer):
            for operand, count in zip(layer.operands, read, strict=True):
                saved += count * (operand.kind == "value")
        if layer.name in self.saving:
            saved += made
        return saved * self.training.itemsize + made * strategy.keeps_beside(layer)

    @cached_property
    def saving(self) -> frozenset[str]:
        """Layers whose output is kept for its own sake: no reader keeps it anyway."""
        keeping = {layer.name for layer in self.graph.layers if STRATEGIES[layer.op].keeps(layer)}
        return frozenset(
            layer.name
            for layer in self.graph.layers
            if STRATEGIES[layer.op].keeps_output(layer)
            and keeping.isdisjoint(self.graph.consumers[layer.name])
        )

    def moving(self, source: Split, target: Split, operand: int) -> np.ndarray:
        """Bytes per rank of an operand that moves: what is held, and where the rest arrives."""
        held = STRATEGIES[source.layer.op].output(source)
        needed = STRATEGIES[target.layer.op].needs(target)[operand].layout
        return (held.numels + needed.numels) * float(self.training.itemsize)

    @cached_property
    def waiting(self) -> dict[str, list[Layer]]:
        """For every layer, what others have made before it, and will be read only after it.

        Where nothing is kept for a backward pass, that is what is kept of earlier layers.
        """
        graph, place = self.graph, {layer.name: i for i, layer in enumerate(self.graph.layers)}
        last = {
            name: max(map(place.__getitem__, graph.consumers[name]), default=-1) for name in place
        }
        last |= dict.fromkeys(graph.outputs, len(place))
        return {
            layer.name: [
                other
                for other in graph.layers[: place[layer.name]]
                if last[other.name] > place[layer.name]
                and not other.is_input
                and other.name not in layer.inputs
            ]
            for layer in graph.layers
        }


@dataclass(frozen=True, eq=False)
class SegmentMemory:
    """What a segment takes that is computed again; bytes per rank."""

    layers: tuple[str, ...]
    kept: np.ndarray  # all the time: what comes from elsewhere
    there_again: np.ndarray  # while its gradients are computed: what else would be kept

    @property
    def freed(self) -> np.ndarray:
        return self.there_again - self.kept

    @classmethod
    def of(cls, plan: Plan, memory: Memory) -> list[SegmentMemory]:
        """Of all segments of a plan, from the program that will run."""
        if not plan.recompute or not memory.training.gradients:
            return []
        program = compile_program(memory.graph, plan, 0, memory.graph.params)
        segments = dict.fromkeys(program.segments.values())
        return [cls._of(segment, program, plan, memory) for segment in segments]

    @classmethod
    def _of(cls, segment: Segment, program: Program, plan: Plan, memory: Memory) -> SegmentMemory:
        kept, again, layers = np.zeros(plan.world), np.zeros(plan.world), []
        for name in segment.inputs:
            kept += program.layouts[name].numels
        for step in segment.steps:
            if isinstance(step, Move):
                transfer = step.transfer
                arrived = transfer.messages.sum(axis=0)
                kept += transfer.target.numels if transfer.adds else arrived
        runs = (step for step in segment.steps if isinstance(step, Run))
        for op in (op for run in runs for op in run.ops):
            split = Split.of(op.local.layer, op.local.config, plan.world)
            again += memory.of(split)[1]
            layers.append(op.local.layer.name)
        return cls(tuple(layers), kept * float(memory.training.itemsize), again)
