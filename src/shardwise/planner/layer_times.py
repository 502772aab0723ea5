"""Measured times of layers: what was measured, how it is kept on disk, and how it is looked up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter

from shardwise.cluster.cluster import Cluster
from shardwise.files import TimesFile
from shardwise.geometry.grid import AXES, Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.layer_costs import Roofline, Timer
from shardwise.plans.program import differentiable


@dataclass(frozen=True)
class Work:
    """One rank's share of a layer, to be timed."""

    key: str
    layer: Layer
    config: Config
    world: int
    rank: int
    input_gradient: bool


def works(
    split: Split, input_gradient: bool, dtype: str = "float32"
) -> tuple[list[Work], np.ndarray]:
    """The different shares of a layer among its ranks, and which share each rank has (-1: none)."""
    layer, strategy = split.layer, STRATEGIES[split.layer.op]
    result = strategy.partial(split) or strategy.output(split)
    layouts = [result, *(need.layout for need in strategy.needs(split))]
    shapes = np.concatenate([np.diff(la.bounds, axis=2)[..., 0] for la in layouts], axis=1)
    gathered = bool(strategy.gathers(split))
    rows = np.column_stack([shapes, split.grid.degrees["n"] * gathered])
    busy = np.flatnonzero(result.numels > 0)
    if not len(busy):
        return [], np.full(len(rows), -1)
    unique, first, place = np.unique(rows[busy], axis=0, return_index=True, return_inverse=True)
    index = np.full(len(rows), -1)
    index[busy] = place.reshape(-1)
    pattern = "".join(a for a in AXES if getattr(split.config, a) > 1)
    head = f"{_described(layer)} split={pattern} dx={int(input_gradient)} {dtype}"
    head += " gather" if gathered else ""
    configs, world, found = split.grid.configs, split.grid.world, []
    for row, rank in zip(unique, busy[first], strict=True):
        key = f"{head} {_shapes_text(row, layouts)}"
        which, own_rank = divmod(int(rank), world)
        found.append(Work(key, layer, configs[which], world, own_rank, input_gradient))
    return found, index


def _described(layer: Layer) -> str:
    """What an operator computes, without names and sizes."""
    facts = {k: v for k, v in layer.facts.items() if k != "module"}
    return f"{layer.op} {facts}"


def _shapes_text(row: np.ndarray, layouts: list) -> str:
    texts, start = [], 0
    for layout in layouts:
        sizes = row[start : start + len(layout.shape)]
        texts.append("x".join(map(str, sizes.tolist())))
        start += len(layout.shape)
    return " ".join(texts) + (f" n={row[-1]}" if row[-1] else "")


@dataclass
class TimeTable(TimesFile):
    """Measured seconds by share of a layer, forward and backward, for one kind of device."""

    device: str

    format = "shardwise-times-1"
    kind = TypeAdapter(dict[str, tuple[float, float]])
    what, remedy, raises = "measured times", "remove the file and probe again", True

    @property
    def name(self) -> str:
        return f"times {self.device}"

    def missing(self, wanted: Iterable[Work]) -> list[Work]:
        """The works that are not measured yet, each once."""
        found = {work.key: work for work in wanted if work.key not in self.seconds}
        return list(found.values())


@dataclass(frozen=True)
class Measured:
    """Times from a table, or one table per rank; from the roofline where nothing was measured."""

    tables: Sequence[Mapping[str, tuple[float, float]]]
    fallback: Roofline
    first: frozenset[str]  # layers whose input needs no gradient

    def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        if STRATEGIES[split.layer.op].free or split.layer.is_input:
            return np.zeros(split.world), np.zeros(split.world)
        shares, index = works(split, split.layer.name not in self.first)
        forward, backward = (t.copy() for t in self.fallback.seconds(split))
        tables = np.arange(split.world) % len(self.tables)
        for place, work in enumerate(shares):
            for number, table in enumerate(self.tables):
                known = table.get(work.key)
                if known is not None:
                    chosen = (index == place) & (tables == number)
                    forward[chosen], backward[chosen] = known
        return forward, backward


def first_layers(graph: LayerGraph) -> frozenset[str]:
    """Layers that read nothing that depends on weights: no gradient flows on from them."""
    trained = differentiable(graph, graph.params, of_any_type=True)
    return frozenset(layer.name for layer in graph.layers if trained.isdisjoint(layer.inputs))


def all_works(splits: Iterable[Split], first: frozenset[str]) -> Iterator[Work]:
    """Everything to be timed for these splits."""
    for split in splits:
        if not split.layer.is_input and not STRATEGIES[split.layer.op].free:
            yield from works(split, split.layer.name not in first)[0]


def timer_for(cluster: Cluster, graph: LayerGraph, itemsize: int = 4) -> Timer:
    """Measured times where the cluster's device has any, else its roofline."""
    roofline = Roofline(cluster.device, itemsize)
    if not cluster.device.name:
        return roofline
    return Measured((TimeTable.load(cluster.device.name).seconds,), roofline, first_layers(graph))
