"""What every config of every layer costs (P4, equation 1): compute, transfer and update.

Compute is measured or comes from a roofline; transfers and updates come from the layouts that the
strategies declare, carried over the cluster's links. Layers that are alike share their costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.geometry.grid import Config
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.candidates import Candidates
from shardwise.planner.config_stacks import Stacks
from shardwise.planner.layer_costs import LayerCosts, Roofline, Timer, Training
from shardwise.planner.layout_columns import Columns, Layouts
from shardwise.planner.links import Network
from shardwise.planner.rings import segments_of
from shardwise.planner.sum_costs import SumCosts
from shardwise.planner.transfer_costs import MANY, Table, Traffic

STATISTICS = 8  # bytes of a number in the sums of a norm
ROUNDING = 1 + 1e-9


class _Appraisal:
    """One layer under many configs: what its strategy says, stack by stack, as arrays of costs."""

    def __init__(self, costs: Costs, layer: Layer, configs: tuple[Config, ...]) -> None:
        self.parent, self.layer, self.configs = costs, layer, configs
        strategy = STRATEGIES[layer.op]
        stacks = costs.stacks.of(configs, strategy.degrees_matter)
        self.places = [np.asarray(places) for places, _ in stacks]
        self.order = np.argsort(np.concatenate(self.places))
        self.splits = [Split.stacked(layer, stack) for _, stack in stacks]
        self.outputs = [strategy.output(split) for split in self.splits]
        self.needs = [
            [needs[i].layout for needs in map(strategy.needs, self.splits)]
            for i in range(len(layer.operands))
        ]

    def costs(self) -> LayerCosts:
        parent, layer = self.parent, self.layer
        trains = parent.training.gradients and layer.name in parent.differentiable
        seconds = [parent.timer.seconds(split) for split in self.splits]
        forward, backward = map(self._most, zip(*seconds, strict=True))
        transfer, moved = self._inside(2.0 if trains else 1.0)
        update, summed = self._update() if trains and layer.params else (0.0 * moved, 0.0)
        sizes = [self._numels(layouts) for layouts in self.needs]
        made = self._numels(self.outputs)
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
            self._most([parent.held(layer, sizes, len(made))]),
            self._most([parent.kept(layer, sizes, made)]) * trains,
            self._layouts(self.outputs, layer.shape),
            tuple(needs),
        )

    def _most(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The most on any rank, for each config."""
        amounts = np.concatenate(parts).reshape(-1, self.parent.world)
        return amounts.max(axis=1)[self.order]

    @staticmethod
    def _numels(layouts: list[Layout]) -> np.ndarray:
        return np.concatenate([layout.numels for layout in layouts])

    def _layouts(self, layouts: list[Layout], shape: tuple[int, ...]) -> Layouts:
        return self.parent.columns.layouts(self.parent.rows(layouts)[self.order], shape)

    def _inside(self, passes: float) -> tuple[np.ndarray, np.ndarray]:
        """Partial results that are added, and statistics that are summed, both ways."""
        strategy = STRATEGIES[self.layer.op]
        seconds, moved = np.zeros((2, len(self.configs)))
        partial = self._sums(map(strategy.partial, self.splits), self.parent.training.itemsize)
        seconds[partial.places] += passes * partial.scatter_seconds()
        moved[partial.places] += passes / 2 * partial.bytes()
        if self.parent.training.statistics == "global":
            sums = self._sums(map(strategy.sums, self.splits), STATISTICS)
            num_sums = passes + strategy.num_sums(self.layer) - 1
            seconds[sums.places] += num_sums * sums.seconds()
            moved[sums.places] += num_sums * sums.bytes()
        return seconds, moved

    def _update(self) -> tuple[np.ndarray, np.ndarray]:
        """Gradients are summed over the ranks that share a block, or gathered (P3)."""
        seconds, moved = np.zeros((2, len(self.configs)))
        gathers = [STRATEGIES[self.layer.op].gathers(split) for split in self.splits]
        for pair in range(max(map(len, gathers))):
            targets = (gathered[pair][1] if gathered else None for gathered in gathers)
            gathered = self._sums(targets, self.parent.training.itemsize)
            seconds[gathered.places] += gathered.scatter_seconds()
            moved[gathered.places] += gathered.bytes() / 2
        for sums in self._blocks([not gathered for gathered in gathers]):
            seconds[sums.places] += sums.seconds()
            moved[sums.places] += sums.bytes()
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
            return SumCosts.none(parent.network)
        rows = parent.rows(present)
        nbytes = self._numels(present).reshape(-1, parent.world).max(axis=1) * float(itemsize)
        users = parent.columns.users(rows[:, 0])
        return SumCosts(parent.network, np.concatenate(places), parent.models(rows), nbytes, users)


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
        # Measured times are kept by the axes that are split; to the roofline they are all the same.
        self.stacks = Stacks(cluster.world, merge=isinstance(self.timer, Roofline))
        self.columns = Columns(cluster.world)
        self.traffic = Traffic(self.network, self.training.itemsize)
        self._keys: dict[str, int] = {}
        self._kinds: dict[Hashable, int] = {}
        self._layers: dict[Hashable, LayerCosts] = {}
        self._alone: dict[Hashable, LayerCosts] = {}
        self._models: dict[Hashable, int] = {}
        self._edges: dict[Hashable, np.ndarray] = {}

    @property
    def world(self) -> int:
        return self.cluster.world

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Layers whose output depends on weights, so that gradients flow back to them."""
        found: set[str] = set()
        for layer in self.graph.layers:
            ends = STRATEGIES[layer.op].ends_gradient(layer)
            if not ends and (layer.params or any(name in found for name in layer.inputs)):
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
        if layer.name not in self._keys:
            attrs = ((k, repr(v)) for k, v in layer.facts.items() if k != "module")
            operands = tuple((o.kind, o.shape) for o in layer.operands)
            looks = layer.op, layer.shape, layer.dims, tuple(attrs), operands
            looks = *looks, self._saves(layer), layer.name in self.differentiable
            self._keys[layer.name] = self._kinds.setdefault(looks, len(self._kinds))
        return self._keys[layer.name]

    def _saves(self, layer: Layer) -> bool:
        """Whether a layer's output is kept for its own sake: no reader keeps it anyway."""
        if not STRATEGIES[layer.op].keeps_output(layer):
            return False
        readers = [self.graph[name] for name in self.graph.consumers[layer.name]]
        return not any(STRATEGIES[reader.op].keeps(reader) for reader in readers)

    def under(self, layer: Layer, configs: tuple[Config, ...]) -> LayerCosts:
        """The costs of a layer under these configs."""
        costs = _Appraisal(self, layer, configs).costs()
        if self.world > MANY:
            self.stacks.forget()
        return costs

    def models(self, rows: np.ndarray) -> np.ndarray:
        """The network's models of sums over ranks that hold the same, by the layouts' columns."""
        known, found = self._models, list(map(tuple, rows.tolist()))
        for row in set(found).difference(known):
            columns = np.array(row)
            pattern = frozenset(self.columns.patterns(columns).tolist())
            if pattern not in known:
                boxes = self.columns.boxes(columns)
                known[pattern] = self.network.model(segments_of(boxes[None])[0])
            known[row] = known[pattern]
        return np.array([known[row] for row in found])

    def rows(self, layouts: Sequence[Layout]) -> np.ndarray:
        """The columns of the layouts of stacks, one after the other; [configs, ndim]."""
        bounds = [layout.bounds for layout in layouts]
        if self.world <= MANY:  # small arrays: one call for all is faster
            bounds = [np.concatenate(bounds)]
        shape = self.world, *bounds[0].shape[1:]
        return np.concatenate([self.columns.of(found.reshape(-1, *shape)) for found in bounds])

    def stored(self, split: Split) -> np.ndarray:
        """Bytes of weights, their gradients and the optimizer's state per rank."""
        needs = STRATEGIES[split.layer.op].needs(split)
        return self.held(split.layer, [need.layout.numels for need in needs], split.world)

    def held(self, layer: Layer, numels: list[np.ndarray], num_ranks: int) -> np.ndarray:
        """The same from the numbers of elements of the operands."""
        copies = 2 + self.training.states if self.training.gradients else 1
        held = np.zeros(num_ranks)
        for operand, count in zip(layer.operands, numels, strict=True):
            if operand.kind != "value":
                held += count * (copies if operand.kind == "param" else 1)
        return held * self.training.itemsize

    def saved(self, split: Split) -> np.ndarray:
        """Bytes that the layer keeps for the backward pass per rank."""
        strategy = STRATEGIES[split.layer.op]
        numels = [need.layout.numels for need in strategy.needs(split)]
        return self.kept(split.layer, numels, strategy.output(split).numels)

    def kept(self, layer: Layer, numels: list[np.ndarray], made: np.ndarray) -> np.ndarray:
        """The same from the numbers of elements of the operands and of the output."""
        strategy, kept = STRATEGIES[layer.op], np.zeros(len(made))
        if strategy.keeps(layer):
            for operand, count in zip(layer.operands, numels, strict=True):
                kept += count * (operand.kind == "value")
        if self._saves(layer):
            kept += made
        return kept * self.training.itemsize + made * strategy.keeps_bytes

    def working(self, split: Split) -> np.ndarray:
        """Bytes per rank that come and go while the layer runs forward or backward."""
        strategy = STRATEGIES[split.layer.op]
        read = sum(
            need.layout.numels
            for operand, need in zip(split.layer.operands, strategy.needs(split), strict=True)
            if operand.kind == "value"
        )
        partial, made = strategy.partial(split), strategy.output(split).numels
        both = 2.0 if self.training.gradients else 1.0  # gradients beside values
        working = (read + (made if partial is None else partial.numels)) * both
        if partial is not None:  # its parts as messages, and those of the others as they arrive
            working = working + 2.0 * partial.numels
        return working * self.training.itemsize

    # -- edges ---------------------------------------------------------------------------------

    def least_edge(self, source: Layer, target: Layer, operand: int) -> np.ndarray:
        """Seconds between every config of two layers; on large clusters a lower bound of them."""
        held, needed, passes = self._ends(source, target, operand)
        key = held.key, needed.key, held.index.tobytes(), needed.index.tobytes(), passes
        if key not in self._edges:
            least = self.traffic.least_seconds(held, needed)
            self._edges[key] = least[np.ix_(held.index, needed.index)] * passes
        return self._edges[key]

    def sharpen(self, source: Layer, target: Layer, operand: int, row: int, column: int) -> bool:
        """Puts the exact seconds of a pair of configs into `least_edge`; whether they are more."""
        if self.world <= MANY:
            return False
        least = self.least_edge(source, target, operand)
        held, needed, passes = self._ends(source, target, operand)
        exact = self.traffic.table(held.one(row), needed.one(column)).seconds[0, 0] * passes
        if exact <= least[row, column] * ROUNDING:
            return False
        alike = held.index == held.index[row], needed.index == needed.index[column]
        least[np.ix_(*alike)] = exact
        return True

    def _ends(self, source: Layer, target: Layer, operand: int) -> tuple[Layouts, Layouts, float]:
        held, needed = self.of(source).outputs, self.of(target).needs[operand]
        assert needed is not None
        return held, needed, self.passes(source)

    def at(self, layer: Layer, config: Config) -> tuple[LayerCosts, int]:
        """The costs of a layer where this config is found, among its candidates or alone."""
        key, config = self.key(layer), usual(layer, config)
        known = self._layers.get(key)
        if known is not None and config in known.places:
            return known, known.places[config]
        if (key, config) not in self._alone:
            self._alone[key, config] = self.under(layer, (config,))
        return self._alone[key, config], 0

    def transfer(
        self, source: Layer, target: Layer, operand: int, ends: tuple[Config, Config]
    ) -> tuple[float, float]:
        """Seconds and bytes between two configs, whether they are candidates or not."""
        (own, row), (other, column) = self.at(source, ends[0]), self.at(target, ends[1])
        held, needed, passes = own.outputs, other.needs[operand], self.passes(source)
        assert needed is not None
        if not self.traffic.knows(held, needed):
            held, needed, row, column = held.one(row), needed.one(column), 0, 0
        table, pick = self.traffic.table(held, needed), (held.index[row], needed.index[column])
        return float(table.seconds[pick]) * passes, float(table.nbytes[pick]) * passes

    def passes(self, source: Layer) -> float:
        """How often a transfer happens: also backward, where gradients flow to its source."""
        flows = self.training.gradients and source.name in self.differentiable
        return 2.0 if flows else 1.0

    def output_table(self, layer: Layer, held: Layouts | None = None) -> Table:
        """Carrying a model's output to all ranks, from each different layout; one way only."""
        held = self.of(layer).outputs if held is None else held
        if self.training.output == "local":
            return Table(*np.zeros((2, len(held), 1)))
        everywhere = self.columns.of(Layout.replicated(layer.shape, self.world).bounds[None])
        return self.traffic.table(held, Layouts.of(self.columns, everywhere))

    def unwanted(self, layer: Layer, held: Layouts) -> np.ndarray:
        """Which layouts of an output leave a rank with a part that lacks classes."""
        training = self.training
        if training.output != "local" or not training.whole_classes or len(layer.shape) < 2:
            return np.zeros(len(held), dtype=bool)
        boxes = held.boxes(np.arange(len(held)))
        sizes = boxes[..., 1] - boxes[..., 0]
        lacking = (sizes > 0).all(axis=-1) & (sizes[..., 1] < layer.shape[1])
        return np.asarray(lacking.any(axis=1))


def usual(layer: Layer, config: Config) -> Config:
    """Where f and c split the same dimension, f alone does."""
    if config.c == 1 or not STRATEGIES[layer.op].joint_channels:
        return config
    return replace(config, f=config.f * config.c, c=1)


def value_operands(layer: Layer) -> list[tuple[int, str]]:
    """The operands that are other layers' outputs, with their places."""
    return [(i, o.name) for i, o in enumerate(layer.operands) if o.kind == "value"]
