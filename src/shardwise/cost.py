"""What every config of every layer costs (P4, equation 1): compute, transfer and update.

Compute is measured or comes from a roofline; transfers and updates come from the layouts that the
strategies declare, carried over the cluster's links. Layers that are alike share their costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from shardwise.candidates import Candidates
from shardwise.cluster import Cluster, Device
from shardwise.config import Config
from shardwise.errors import PlanError
from shardwise.graph import Layer, LayerGraph
from shardwise.layout import Layout
from shardwise.network import Network, segments_of
from shardwise.strategies import Split, Stack, strategy_of
from shardwise.traffic import Table, transfer_table

COLUMNS = ("forward", "backward", "transfer", "update", "moved", "stored", "saved")
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
    if not strategy.gathers(split):
        return np.zeros(split.world)
    return strategy.flops(split) * (split.grid.degrees["n"] - 1.0)


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


@dataclass(frozen=True, eq=False)
class _Distinct:
    """The different layouts among those of all configs, and which each config has."""

    layouts: list[Layout]
    index: tuple[int, ...]
    digest: bytes  # the same for the same layouts

    @classmethod
    def of(cls, layouts: list[Any]) -> _Distinct:
        found: dict[bytes, int] = {}
        index = [found.setdefault(layout.bounds.tobytes(), len(found)) for layout in layouts]
        digest = blake2b(repr(layouts[0].shape).encode(), digest_size=16)
        for key in found:
            digest.update(key)
        first = [layouts[index.index(place)] for place in range(len(found))]
        return cls(first, tuple(index), digest.digest())


def _place(found: list[Any], places: list[int], stacked: Layout) -> None:
    """The layouts of a stack, each at the place of its config."""
    world = len(stacked.bounds) // len(places)
    bounds = stacked.bounds.reshape(len(places), world, *stacked.bounds.shape[1:])
    for place, own in zip(places, bounds, strict=True):
        found[place] = Layout(stacked.shape, own)


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
        self._tables: dict[Hashable, Table] = {}
        self._edges: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}
        self._known_stacks: dict[Hashable, tuple[Any, list[tuple[list[int], Stack]]]] = {}

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
        arrays = {name: np.zeros(len(configs)) for name in COLUMNS}
        held: list[Any] = [None] * len(configs)
        needed = [[None] * len(configs) if o.kind == "value" else [] for o in layer.operands]
        for places, stack in self._stacks(configs, strategy_of(layer).degrees_matter):
            split = Split.stacked(layer, stack)
            for name, values in self._columns(split).items():
                arrays[name][places] = values
            _place(held, places, strategy_of(layer).output(split))
            for found, need in zip(needed, strategy_of(layer).needs(split), strict=True):
                if found:
                    _place(found, places, need.layout)
        needs = tuple(_Distinct.of(found) if found else None for found in needed)
        return LayerCosts(configs=configs, outputs=_Distinct.of(held), needs=needs, **arrays)

    def _stacks(self, configs: tuple[Config, ...], apart: bool) -> list[tuple[list[int], Stack]]:
        """Configs that can be judged together: they split the same axes."""
        key = (id(configs), apart)
        if key not in self._known_stacks:
            groups: dict[Hashable, list[int]] = {}
            for place, config in enumerate(configs):
                pattern = (config.gradient, *(degree > 1 for degree in config.degrees))
                groups.setdefault((place if apart else 0, pattern), []).append(place)
            stacks = [
                (places, Stack(tuple(configs[i] for i in places), self.world))
                for places in groups.values()
            ]
            self._known_stacks[key] = (configs, stacks)  # the configs stay alive with their id
        return self._known_stacks[key][1]

    def _columns(self, split: Split) -> dict[str, Any]:
        layer = split.layer
        forward, backward = (self._most(t) for t in self.timer.seconds(split))
        trains = self.training.gradients and layer.name in self.differentiable
        transfer, moved = self._inside(split, 2.0 if trains else 1.0)
        update, summed = self._update(split) if trains and layer.params else (0.0, 0.0)
        return {
            "forward": forward,
            "backward": backward * trains,
            "transfer": transfer,
            "update": update,
            "moved": moved + summed,
            "stored": self._most(self.stored(split)),
            "saved": self._most(self.saved(split)) * trains,
        }

    def _most(self, amounts: np.ndarray) -> np.ndarray:
        """The most on any rank, for each config of a stack."""
        return amounts.reshape(-1, self.world).max(axis=1)

    def _inside(self, split: Split, passes: float) -> tuple[Any, Any]:
        """Partial results that are added, and statistics that are summed, both ways."""
        strategy, seconds, moved = strategy_of(split.layer), 0.0, 0.0
        partial = strategy.partial(split)
        if partial is not None:
            amounts = self._amounts(partial, self.training.itemsize)
            seconds += passes * self._each(self.network.scatter_seconds, amounts)
            moved += passes / 2 * self._each(self.network.sum_bytes, amounts)
        sums = strategy.sums(split)
        if sums is not None:
            amounts = self._amounts(sums, STATISTICS)
            seconds += passes * self._each(self.network.sum_seconds, amounts)
            moved += passes * self._each(self.network.sum_bytes, amounts)
        return seconds, moved

    def _update(self, split: Split) -> tuple[Any, Any]:
        """Gradients are summed over the ranks that share a block, or gathered (P3)."""
        strategy, seconds, moved = strategy_of(split.layer), 0.0, 0.0
        gathers = strategy.gathers(split)
        for _, target in gathers:
            amounts = self._amounts(target, self.training.itemsize)
            seconds += self._each(self.network.scatter_seconds, amounts)
            moved += self._each(self.network.sum_bytes, amounts) / 2
        for amounts in () if gathers else self._blocks(split):
            seconds += self._each(self.network.sum_seconds, amounts)
            moved += self._each(self.network.sum_bytes, amounts)
        return seconds, moved

    def _amounts(self, layout: Layout, itemsize: int) -> list[tuple[np.ndarray, float]]:
        """For each config of a stack: which ranks hold the same, and its bytes."""
        bounds = layout.bounds.reshape(-1, self.world, *layout.bounds.shape[1:])
        sizes = self._most(layout.numels) * float(itemsize)
        return list(zip(segments_of(bounds), sizes.tolist(), strict=True))

    @staticmethod
    def _each(
        measure: Callable[[np.ndarray, float], float], amounts: list[tuple[np.ndarray, float]]
    ) -> np.ndarray:
        return np.array([measure(segments, nbytes) for segments, nbytes in amounts])

    def _blocks(self, split: Split) -> list[list[tuple[np.ndarray, float]]]:
        """The blocks of weights; those of smaller parameters of the same ranks go with the first.

        A bias is packed with its weight, except where only some of the ranks carry it.
        """
        needs = strategy_of(split.layer).needs(split)
        found: list[list[tuple[np.ndarray, float]]] = []
        for operand, need in zip(split.layer.operands, needs, strict=True):
            if operand.kind != "param":
                continue
            amounts = self._amounts(need.layout, self.training.itemsize)
            if found and all(
                np.array_equal(a[0] < 0, b[0] < 0) for a, b in zip(found[0], amounts, strict=True)
            ):
                found[0] = [(s, n + m) for (s, n), (_, m) in zip(found[0], amounts, strict=True)]
            else:
                found.append(amounts)
        return found

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

    def working(self, split: Split) -> np.ndarray:
        """Bytes per rank that come and go while the layer runs forward or backward."""
        strategy = strategy_of(split.layer)
        read = sum(
            need.layout.numels
            for operand, need in zip(split.layer.operands, strategy.needs(split), strict=True)
            if operand.kind == "value"
        )
        made = (strategy.partial(split) or strategy.output(split)).numels
        both = 2.0 if self.training.gradients else 1.0  # gradients beside values
        return (read + made) * both * self.training.itemsize

    # -- edges ---------------------------------------------------------------------------------

    def edge(self, source: Layer, target: Layer, operand: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes between every config of two layers; [source's, target's]."""
        held, needed = self.of(source).outputs, self.of(target).needs[operand]
        assert needed is not None
        passes = self.passes(source)
        pair = held.digest, needed.digest
        key = pair, held.index, needed.index, passes
        if key not in self._edges:
            if pair not in self._tables:
                self._tables[pair] = self._table(held.layouts, needed.layouts)
            table, pick = self._tables[pair], np.ix_(held.index, needed.index)
            self._edges[key] = table.seconds[pick] * passes, table.nbytes[pick] * passes
        return self._edges[key]

    def at(self, layer: Layer, config: Config) -> tuple[LayerCosts, int]:
        """The costs of a layer where this config is found, among its candidates or alone."""
        known = self._layers.get(self.key(layer))
        config = usual(layer, config)
        if known is not None and config in known.places:
            return known, known.places[config]
        return self.under(layer, (config,)), 0

    def place(self, layer: Layer, config: Config) -> int:
        """Which of a layer's candidates this config is."""
        found = self.of(layer).places.get(usual(layer, config))
        if found is None:
            raise PlanError(
                f"layer {layer.name!r}: {config} is not among the splits that are tried"
            )
        return found

    def known_edge(
        self, source: Layer, target: Layer, operand: int, held: Config, needed: Config
    ) -> tuple[float, float] | None:
        """Seconds and bytes between two configs, where both are candidates."""
        if self.key(source) not in self._layers or self.key(target) not in self._layers:
            return None
        row = self.of(source).places.get(usual(source, held))
        column = self.of(target).places.get(usual(target, needed))
        if row is None or column is None:
            return None
        seconds, nbytes = self.edge(source, target, operand)
        return float(seconds[row, column]), float(nbytes[row, column])

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


def usual(layer: Layer, config: Config) -> Config:
    """Where f and c split the same dimension, f alone does."""
    if config.c == 1 or not strategy_of(layer).joint_channels:
        return config
    return replace(config, f=config.f * config.c, c=1)


def value_operands(layer: Layer) -> list[tuple[int, str]]:
    """The operands that are other layers' outputs, with their places."""
    return [(i, o.name) for i, o in enumerate(layer.operands) if o.kind == "value"]
