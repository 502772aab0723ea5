"""What every config of every layer costs (P4, equation 1): compute, transfer and update.

Compute is measured or comes from a roofline; transfers and updates come from the layouts that the
strategies declare, carried over the cluster's links. Layers that are alike share their costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from shardwise.candidates import Candidates
from shardwise.cluster import Cluster, Device
from shardwise.config import Config
from shardwise.graph import Layer, LayerGraph
from shardwise.layout import Layout
from shardwise.network import Network, segments_of
from shardwise.strategies import Split, strategy_of
from shardwise.traffic import Table, transfer_table

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
        strategy = strategy_of(split.layer)
        if strategy.free or split.layer.op == "input":
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
    strategy = strategy_of(split.layer)
    gathers = strategy.gathers(split)
    if not gathers:
        return np.zeros(split.world)
    return strategy.flops(split) * (split.config.n - 1.0)


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as it costs time and memory."""

    itemsize: int = 4
    states: int = 1  # numbers per weight that the optimizer keeps: 1 for momentum, 2 for Adam
    output: str = "full"  # every rank gets the whole output, or "local": its part
    gradients: bool = True  # False: inference only


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
    saved: np.ndarray  # bytes kept for the backward pass
    outputs: _Distinct
    needs: tuple[_Distinct | None, ...]  # per operand; None for weights

    @cached_property
    def compute(self) -> np.ndarray:
        return self.forward + self.backward

    @cached_property
    def total(self) -> np.ndarray:
        return self.compute + self.transfer + self.update

    @cached_property
    def memory(self) -> np.ndarray:
        return self.stored + self.saved


@dataclass(eq=False)
class _Distinct:
    """The different layouts among those of all configs, and which each config has."""

    layouts: list[Layout] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    _found: dict[Layout, int] = field(default_factory=dict)

    def add(self, layout: Layout) -> None:
        place = self._found.setdefault(layout, len(self.layouts))
        if place == len(self.layouts):
            self.layouts.append(layout)
        self.index.append(place)


class Costs:
    """The costs of a graph's layers and of the edges between them on a cluster."""

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        timer: Timer | None = None,
        training: Training | None = None,
    ) -> None:
        self.graph, self.cluster = graph, cluster
        self.training = training or Training()
        self.timer = timer or Roofline(cluster.device, self.training.itemsize)
        self.network = Network(cluster)
        self.candidates = Candidates.of(graph, cluster.world)
        self._layers: dict[Hashable, LayerCosts] = {}
        self._edges: dict[Hashable, np.ndarray] = {}

    @property
    def world(self) -> int:
        return self.cluster.world

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Layers whose output depends on weights, so that gradients flow back to them."""
        found: set[str] = set()
        for layer in self.graph.layers:
            if layer.params or any(name in found for name in layer.inputs):
                found.add(layer.name)
        return frozenset(found)

    # -- layers --------------------------------------------------------------------------------

    def of(self, layer: Layer) -> LayerCosts:
        """The costs of a layer under all its candidates."""
        key = self.key(layer)
        if key not in self._layers:
            configs = self.candidates.configs(layer, self.graph.batch)
            self._layers[key] = self.under(layer, configs)
        return self._layers[key]

    def key(self, layer: Layer) -> Hashable:
        """What layers that cost the same have in common."""
        attrs = sorted((k, repr(v)) for k, v in layer.attrs.items() if k != "module")
        operands = tuple((o.kind, o.shape) for o in layer.operands)
        flows = layer.name in self.differentiable
        return layer.op, layer.shape, layer.dims, tuple(attrs), operands, self._saves(layer), flows

    def _saves(self, layer: Layer) -> bool:
        """Whether a layer's output is kept for its own sake: no reader keeps it anyway."""
        if not strategy_of(layer).keeps_output(layer):
            return False
        readers = [self.graph[name] for name in self.graph.consumers[layer.name]]
        return not any(strategy_of(reader).keeps(reader) for reader in readers)

    def under(self, layer: Layer, configs: tuple[Config, ...]) -> LayerCosts:
        """The costs of a layer under these configs."""
        rows: dict[str, list[float]] = {
            name: []
            for name in "forward backward transfer update moved stored saved".split()  # noqa: SIM905
        }
        outputs = _Distinct()
        needs = tuple(_Distinct() if o.kind == "value" else None for o in layer.operands)
        for config in configs:
            split = Split(layer, config, self.world)
            for name, value in self._row(split).items():
                rows[name].append(value)
            strategy = strategy_of(layer)
            outputs.add(strategy.output(split))
            for distinct, need in zip(needs, strategy.needs(split), strict=True):
                if distinct is not None:
                    distinct.add(need.layout)
        arrays = {name: np.array(values) for name, values in rows.items()}
        return LayerCosts(configs=configs, outputs=outputs, needs=needs, **arrays)

    def _row(self, split: Split) -> dict[str, float]:
        layer = split.layer
        forward, backward = (float(t.max()) for t in self.timer.seconds(split))
        trains = self.training.gradients and layer.name in self.differentiable
        transfer, moved = self._inside(split, 2.0 if trains else 1.0)
        update, summed = self._update(split) if trains else (0.0, 0.0)
        return {
            "forward": forward,
            "backward": backward if trains else 0.0,
            "transfer": transfer,
            "update": update,
            "moved": moved + summed,
            "stored": float(self.stored(split).max()),
            "saved": float(self.saved(split).max()) if trains else 0.0,
        }

    def _inside(self, split: Split, passes: float) -> tuple[float, float]:
        """Partial results that are added, and statistics that are summed, both ways."""
        strategy, seconds, moved = strategy_of(split.layer), 0.0, 0.0
        partial = strategy.partial(split)
        if partial is not None:
            table = self._table([strategy.output(split)], [partial])
            seconds += float(table.seconds[0, 0]) * passes
            moved += float(table.nbytes[0, 0]) * passes
        sums = strategy.sums(split)
        if sums is not None:
            nbytes = float(sums.numels.max()) * STATISTICS
            segments = segments_of(sums.bounds)
            seconds += self.network.sum_seconds(segments, nbytes) * passes
            moved += self.network.sum_bytes(segments, nbytes) * passes
        return seconds, moved

    def _update(self, split: Split) -> tuple[float, float]:
        """Gradients are summed over the ranks that share a block, or gathered (P3)."""
        strategy, seconds, moved = strategy_of(split.layer), 0.0, 0.0
        for source, target in strategy.gathers(split):
            table = self._table([source], [target])
            seconds += float(table.seconds[0, 0])
            moved += float(table.nbytes[0, 0])
        if not strategy.gathers(split):
            for segments, nbytes in self.blocks(split):
                seconds += self.network.sum_seconds(segments, nbytes)
                moved += self.network.sum_bytes(segments, nbytes)
        return seconds, moved

    def blocks(self, split: Split) -> list[tuple[np.ndarray, float]]:
        """Which ranks sum which amount of gradients: parameters of the same segments together."""
        found: dict[bytes, tuple[np.ndarray, float]] = {}
        needs = strategy_of(split.layer).needs(split)
        for operand, need in zip(split.layer.operands, needs, strict=True):
            if operand.kind == "param":
                segments = segments_of(need.layout.bounds)
                nbytes = float(need.layout.numels.max()) * self.training.itemsize
                known = found.get(segments.tobytes(), (segments, 0.0))
                found[segments.tobytes()] = (segments, known[1] + nbytes)
        return list(found.values())

    def stored(self, split: Split) -> np.ndarray:
        """Bytes of weights, their gradients and the optimizer's state per rank."""
        needs = strategy_of(split.layer).needs(split)
        copies = 2 + self.training.states if self.training.gradients else 1
        held = np.zeros(split.world)
        for operand, need in zip(split.layer.operands, needs, strict=True):
            if operand.kind != "value":
                held += need.layout.numels * (copies if operand.kind == "param" else 1)
        return held * self.training.itemsize

    def saved(self, split: Split) -> np.ndarray:
        """Bytes that the layer keeps for the backward pass per rank."""
        layer, strategy = split.layer, strategy_of(split.layer)
        kept = np.zeros(split.world)
        if strategy.keeps(layer):
            for operand, need in zip(layer.operands, strategy.needs(split), strict=True):
                kept += need.layout.numels * (operand.kind == "value")
        if self._saves(layer):
            kept += strategy.output(split).numels
        extra = strategy.output(split).numels * strategy.keeps_bytes
        return kept * self.training.itemsize + extra

    # -- edges ---------------------------------------------------------------------------------

    def edge(self, source: Layer, target: Layer, operand: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes between every config of two layers; [source's, target's]."""
        key = self.key(source), self.key(target), operand
        if (key, "seconds") not in self._edges:
            held, needed = self.of(source).outputs, self.of(target).needs[operand]
            assert needed is not None
            table = self._table(held.layouts, needed.layouts)
            both = self.passes(source)
            pick = np.ix_(held.index, needed.index)
            self._edges[key, "seconds"] = table.seconds[pick] * both
            self._edges[key, "bytes"] = table.nbytes[pick] * both
        return self._edges[key, "seconds"], self._edges[key, "bytes"]

    def passes(self, source: Layer) -> float:
        """How often a transfer happens: also backward, where gradients flow to its source."""
        flows = self.training.gradients and source.name in self.differentiable
        return 2.0 if flows else 1.0

    def output_table(self, layer: Layer) -> Table:
        """Carrying a model's output to all ranks, from each different layout; one way only."""
        layouts = self.of(layer).outputs.layouts
        if self.training.output == "local":
            return Table(np.zeros((len(layouts), 1)), np.zeros((len(layouts), 1)))
        return self._table(layouts, [Layout.replicated(layer.shape, self.world)])

    def _table(self, sources: list[Layout], targets: list[Layout]) -> Table:
        return transfer_table(sources, targets, self.training.itemsize, self.network)


def value_operands(layer: Layer) -> list[tuple[int, str]]:
    """The operands that are other layers' outputs, with their places."""
    return [(i, o.name) for i, o in enumerate(layer.operands) if o.kind == "value"]
