"""What every config of every layer costs (P4, equation 1): compute, transfer and update.

Compute is measured or comes from a roofline; transfers and updates come from the layouts that the
strategies declare, carried over the cluster's links. Layers that are alike share their costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.geometry.grid import Config
from shardwise.geometry.layout import Layout, first_holders
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES
from shardwise.planner.candidates import Candidates, Stacks
from shardwise.planner.layer_costs import Appraisal, LayerCosts, Roofline, Timer, Training
from shardwise.planner.layout_columns import Columns, Layouts
from shardwise.planner.links import Network
from shardwise.planner.memory import Memory
from shardwise.planner.transfer_costs import MANY, Table, Traffic
from shardwise.plans.program import differentiable, handed_out

ROUNDING = 1 + 1e-9


class Costs:
    """The costs of a graph's layers and of the edges between them on a cluster."""

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        timer: Timer | None = None,
        training: Training | None = None,
    ) -> None:
        self.graph, self.cluster, self.world = graph, cluster, cluster.world
        self.differentiable = differentiable(graph, graph.params, of_any_type=True)
        self.training = training or Training()
        self.timer = timer or Roofline(cluster.device, self.training.itemsize)
        self.network, self.memory = Network(cluster), Memory(graph, self.training)
        self.candidates = Candidates.of(graph, self.world)
        # Measured times are kept by the axes that are split; to the roofline they are all the same.
        self.stacks = Stacks(self.world, merge=isinstance(self.timer, Roofline))
        self.columns = Columns(self.world)
        self.traffic = Traffic(self.network, self.training.itemsize)
        self._keys: dict[str, int] = {}
        self._kinds: dict[Hashable, int] = {}
        self._first: dict[int, Layer] = {}  # of each kind
        self._layers: dict[Hashable, LayerCosts] = {}
        self._alone: dict[tuple[Hashable, Config], LayerCosts] = {}
        self._models: dict[Hashable, int] = {}
        self._edges: dict[Hashable, np.ndarray] = {}
        self.pins: Mapping[str, tuple[Config, ...]] = {}  # layers with these configs only
        self.predictions: dict[Hashable, Any] = {}  # of plans, see `predict`
        self.traces: dict[Hashable, Any] = {}  # of plans, see `Steps`

    @cached_property
    def sources(self) -> dict[str, list[tuple[int, Layer]]]:
        """The operands of each layer that are made by other layers: their places and makers."""
        made = {layer.name: layer for layer in self.graph.layers if not layer.is_input}
        return {
            layer.name: [(i, made[name]) for i, name in value_operands(layer) if name in made]
            for layer in made.values()
        }

    # -- layers --------------------------------------------------------------------------------

    def of(self, layer: Layer) -> LayerCosts:
        """The costs of a layer under all its candidates."""
        key = self.key(layer)
        if key not in self._layers:
            configs = self.pins.get(layer.name) or self.candidates.configs(layer, self.graph.batch)
            self._layers[key] = self.under(layer, configs)
        return self._layers[key]

    def key(self, layer: Layer) -> int:
        """What layers that cost the same have in common."""
        if layer.name not in self._keys:
            facts = ((k, repr(v)) for k, v in layer.facts.items() if k != "module")
            operands = tuple((o.kind, o.shape) for o in layer.operands)
            looks = layer.op, layer.shape, layer.dims, tuple(facts), operands
            looks = *looks, layer.name in self.memory.saving, layer.name in self.differentiable
            looks = *looks, self.pins.get(layer.name)
            self._keys[layer.name] = self._kinds.setdefault(looks, len(self._kinds))
            self._first.setdefault(self._keys[layer.name], layer)
        return self._keys[layer.name]

    def alike(self, layer: Layer) -> Layer:
        """The first layer that costs the same: of repeated blocks only one is looked at."""
        return self._first[self.key(layer)]

    def pinned(self, pins: Mapping[str, tuple[Config, ...]]) -> Costs:
        """The same costs where these layers have these configs only; all else is shared."""
        found = copy(self)
        found.pins = {**self.pins, **pins}
        found._keys = {name: key for name, key in self._keys.items() if name not in pins}
        return found

    def keeps_pins(self, configs: Mapping[str, Config]) -> bool:
        """Whether layers that are pinned have such a config."""
        return all(usual(self.graph[n], configs[n]) in pin for n, pin in self.pins.items())

    def under(self, layer: Layer, configs: tuple[Config, ...]) -> LayerCosts:
        """The costs of a layer under these configs."""
        costs = Appraisal(self, layer, configs).costs()
        if self.world > MANY:
            self.stacks.forget()
        return costs

    def sum_models(self, rows: np.ndarray) -> np.ndarray:
        """The network's models of sums over ranks that hold the same, by the layouts' columns."""
        known, found = self._models, list(map(tuple, rows.tolist()))
        for row in set(found).difference(known):
            columns = np.array(row)
            pattern = frozenset(self.columns.patterns(columns).tolist())
            if pattern not in known:
                boxes = self.columns.boxes(columns)
                known[pattern] = self.network.sum_model(first_holders(boxes))
            known[row] = known[pattern]
        return np.array([known[row] for row in found])

    def rows(self, layouts: Sequence[Layout]) -> np.ndarray:
        """The columns of the layouts of stacks, one after the other; [configs, ndim]."""
        bounds = [layout.bounds for layout in layouts]
        if self.world <= MANY:  # small arrays: one call for all is faster
            bounds = [np.concatenate(bounds)]
        shape = self.world, *bounds[0].shape[1:]
        return np.concatenate([self.columns.of(found.reshape(-1, *shape)) for found in bounds])

    # -- edges ---------------------------------------------------------------------------------

    def least_edge(self, source: Layer, target: Layer, operand: int) -> np.ndarray:
        """Seconds between every config of two layers; on large clusters a lower bound of them."""
        held, needed, passes = self._ends(source, target, operand)
        key = held.key, needed.key, held.index.tobytes(), needed.index.tobytes(), passes
        if key not in self._edges:
            least = self.traffic.table(held, needed, sampled=True).seconds
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
        return held, needed, self.times_carried(source)

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
        held, needed, passes = own.outputs, other.needs[operand], self.times_carried(source)
        assert needed is not None
        if not self.traffic.knows(held, needed):
            held, needed, row, column = held.one(row), needed.one(column), 0, 0
        table, pick = self.traffic.table(held, needed), (held.index[row], needed.index[column])
        return float(table.seconds[pick]) * passes, float(table.nbytes[pick]) * passes

    def times_carried(self, source: Layer) -> float:
        """How often a transfer happens: also backward, where gradients flow to its source."""
        flows = self.training.gradients and source.name in self.differentiable
        return 2.0 if flows else 1.0

    def output_table(self, layer: Layer, held: Layouts | None = None) -> Table:
        """Handing out a model's output, from each different layout; one way only."""
        held = self.of(layer).outputs if held is None else held
        transfer = handed_out(Layout.on(layer.shape, self.world, (0,)), self.training.output)
        if transfer is None:
            return Table(*np.zeros((2, len(held), 1)))
        target = self.columns.of(transfer.target.bounds[None])
        return self.traffic.table(held, Layouts.of(self.columns, target))

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
