"""What a layer costs under each of its configs: compute, transfer inside it, update, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from shardwise.cluster.cluster import Device
from shardwise.geometry.grid import Config
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.layout_columns import Layouts
from shardwise.planner.sum_costs import SumCosts, SumModel

if TYPE_CHECKING:
    from shardwise.planner.costs import Costs


STATISTICS = 8  # bytes of a number in the sums of a norm


class Timer(Protocol):
    """Says how long a layer's forward and backward computation take on each rank."""

    def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Roofline:
    """Computation at the device's speed, or as fast as its memory delivers operands."""

    device: Device
    itemsize: int = 4

    def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        strategy = STRATEGIES[split.layer.op]
        if strategy.free or split.layer.is_input:
            return np.zeros(split.world), np.zeros(split.world)
        computing = strategy.flops(split) / self.device.flops
        moving = strategy.bytes(split, self.itemsize) / self.device.memory_bandwidth
        busy = strategy.output(split).numels > 0
        launch = self.device.launch * busy
        once = np.maximum(computing, moving) * busy
        extra = gathered_flops(split) / self.device.flops
        return once + launch, 2.0 * (once + launch) + extra


def gathered_flops(split: Split) -> np.ndarray:
    """What computing a whole weight gradient on every rank adds to its share (P3)."""
    strategy = STRATEGIES[split.layer.op]
    if not strategy.gathers(split):
        return np.zeros(split.world)
    return strategy.flops(split) * (split.grid.degrees["n"] - 1.0)


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as it costs time and memory."""

    itemsize: int = 4
    states: int = 1  # numbers per weight that the optimizer keeps: 1 for momentum, 2 for Adam
    shard_state: bool = False  # ranks with the same weights share these numbers, a part each
    output: str = "full"  # how the user gets outputs, see `handed_out`
    whole_classes: bool = True  # of a part, which a loss needs
    gradients: bool = True  # False: inference only
    # Of norms; "local": each rank its own, as in other systems that are simulated.
    statistics: Literal["global", "local"] = "global"

    @classmethod
    def none(cls, output: str = "full") -> Training:
        """Inference: nothing is trained."""
        return cls(states=0, output=output, whole_classes=False, gradients=False)


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """The costs of one layer under each of its configs, in seconds and bytes."""

    configs: tuple[Config, ...]
    forward: np.ndarray  # [configs], as the others
    backward: np.ndarray
    transfer: np.ndarray  # inside the layer: partial sums and statistics
    update: np.ndarray
    moved: np.ndarray  # bytes of transfer and update
    stored: np.ndarray  # bytes of weights, gradients and optimizer on the fullest rank
    saved: np.ndarray  # bytes kept for the backward pass; without one, those it works on
    first: np.ndarray  # bytes that rank 0, which all candidates use, holds all the time
    at_work: np.ndarray  # bytes that come and go on rank 0 as it runs, at least
    outputs: Layouts
    needs: tuple[Layouts | None, ...]  # per operand; None for weights

    @cached_property
    def places(self) -> dict[Config, int]:
        return {config: place for place, config in enumerate(self.configs)}

    @cached_property
    def compute(self) -> np.ndarray:
        return self.forward + self.backward

    @cached_property
    def total(self) -> np.ndarray:
        return self.compute + self.transfer + self.update

    @cached_property
    def memory(self) -> np.ndarray:
        return self.stored + self.saved


class Appraisal:
    """One layer under many configs: what its strategy says, stack by stack, as arrays of costs."""

    def __init__(self, costs: Costs, layer: Layer, configs: tuple[Config, ...]) -> None:
        self.parent, self.layer, self.configs = costs, layer, configs
        self.strategy = strategy = STRATEGIES[layer.op]
        stacks = costs.stacks.of(configs, strategy.degrees_matter)
        self.places = [np.asarray(places) for places, _ in stacks]
        self.order = np.argsort(np.concatenate(self.places))
        self.splits = [Split.stacked(layer, stack) for _, stack in stacks]
        self.outputs = [strategy.output(split) for split in self.splits]
        needed = [strategy.needs(split) for split in self.splits]
        self.needs = [[needs[i].layout for needs in needed] for i in range(len(layer.operands))]

    def costs(self) -> LayerCosts:
        parent, layer = self.parent, self.layer
        trains = parent.training.gradients and layer.name in parent.differentiable
        seconds = [parent.timer.seconds(split) for split in self.splits]
        forward, backward = map(self._most, zip(*seconds, strict=True))
        transfer, moved = self._inside(2.0 if trains else 1.0)
        update, summed = self._update() if trains and layer.params else (0.0 * moved, 0.0)
        sizes = [self._numels(layouts) for layouts in self.needs]
        made = self._numels(self.outputs)
        stored, kept = parent.memory.stored(layer, sizes, made), self._kept(trains, sizes, made)
        held = stored + kept * parent.training.gradients
        needs = [
            self._layouts(layouts, operand.shape) if operand.kind == "value" else None
            for operand, layouts in zip(layer.operands, self.needs, strict=True)
        ]
        return LayerCosts(
            self.configs,
            forward,
            backward * trains,
            transfer,
            update,
            moved + summed,
            self._most([stored]),
            self._most([kept]),
            self._on_first(held),
            self._on_first(parent.memory.working(layer, sizes, made)) * (1 + trains),
            self._layouts(self.outputs, layer.shape),
            tuple(needs),
        )

    def _kept(self, trains: bool, read: Sequence[np.ndarray], made: np.ndarray) -> np.ndarray:
        memory = self.parent.memory
        if not self.parent.training.gradients:
            return memory.working(self.layer, read, made)
        return memory.saved(self.layer, read, made) * trains

    def _most(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The most on any rank, for each config."""
        amounts = np.concatenate(parts).reshape(-1, self.parent.world)
        return amounts.max(axis=1)[self.order]

    def _on_first(self, amounts: np.ndarray) -> np.ndarray:
        """What rank 0 has, for each config."""
        return amounts.reshape(-1, self.parent.world)[self.order, 0]

    @staticmethod
    def _numels(layouts: list[Layout]) -> np.ndarray:
        return np.concatenate([layout.numels for layout in layouts])

    def _layouts(self, layouts: list[Layout], shape: tuple[int, ...]) -> Layouts:
        return self.parent.columns.layouts(self.parent.rows(layouts)[self.order], shape)

    def _inside(self, passes: float) -> tuple[np.ndarray, np.ndarray]:
        """Partial results that are added, and statistics that are summed, both ways."""
        strategy = self.strategy
        seconds, moved = np.zeros((2, len(self.configs)))
        partial = self._sums(map(strategy.partial, self.splits), self.parent.training.itemsize)
        seconds[partial.places] += passes * partial.each(SumModel.scatter_seconds)
        moved[partial.places] += passes / 2 * partial.each(SumModel.bytes)
        if self.parent.training.statistics == "global":
            sums = self._sums(map(strategy.sums, self.splits), STATISTICS)
            num_sums = passes + strategy.num_sums(self.layer) - 1
            seconds[sums.places] += num_sums * sums.each(SumModel.seconds)
            moved[sums.places] += num_sums * sums.each(SumModel.bytes)
        return seconds, moved

    def _update(self) -> tuple[np.ndarray, np.ndarray]:
        """Gradients are summed over the ranks that share a block, or gathered (P3)."""
        seconds, moved = np.zeros((2, len(self.configs)))
        gathers = [self.strategy.gathers(split) for split in self.splits]
        for pair in range(max(map(len, gathers))):
            targets = (gathered[pair][1] if gathered else None for gathered in gathers)
            gathered = self._sums(targets, self.parent.training.itemsize)
            seconds[gathered.places] += gathered.each(SumModel.scatter_seconds)
            moved[gathered.places] += gathered.each(SumModel.bytes) / 2
        for sums in self._blocks([not gathered for gathered in gathers]):
            seconds[sums.places] += sums.each(SumModel.seconds)
            moved[sums.places] += sums.each(SumModel.bytes)
        return seconds, moved

    def _blocks(self, summed: list[bool]) -> list[SumCosts]:
        """The blocks of weights; those of smaller parameters of the same ranks go with the first.

        A bias is packed with its weight, except where only some of the ranks carry it.
        """
        found: list[SumCosts] = []
        for operand, layouts in zip(self.layer.operands, self.needs, strict=True):
            if operand.kind != "param":
                continue
            there = (layout if s else None for s, layout in zip(summed, layouts, strict=True))
            sums = self._sums(there, self.parent.training.itemsize)
            if found:
                packed = sums.users == found[0].users
                found[0].nbytes[packed] += sums.nbytes[packed]
                sums = sums.where(~packed)
            found.append(sums)
        return found

    def _sums(self, layouts: Iterable[Layout | None], itemsize: int) -> SumCosts:
        """For each config that has such a layout: which ranks hold the same, and its bytes."""
        parent, pairs = self.parent, list(zip(self.places, layouts, strict=True))
        places = [places for places, layout in pairs if layout is not None]
        present = [layout for _, layout in pairs if layout is not None]
        if not present:
            return SumCosts.none()
        rows = parent.rows(present)
        nbytes = self._numels(present).reshape(-1, parent.world).max(axis=1) * float(itemsize)
        users = parent.columns.users(rows[:, 0])
        models, known = parent.sum_models(rows), parent.network.sum_models
        return SumCosts(known, np.concatenate(places), models, nbytes, users)
