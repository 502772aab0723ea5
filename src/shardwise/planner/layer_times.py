"""Measured times of layers: what was measured, how it is kept on disk, and how it is looked up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.files import alone_with, write_whole
from shardwise.geometry.grid import AXES, Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.layer_costs import Roofline, Timer

FORMAT = "shardwise-times-1"


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
    degrees = np.stack([np.broadcast_to(split.grid.degrees["n"], len(shapes))], axis=1)
    gathered = bool(strategy.gathers(split))
    rows = np.concatenate([shapes, degrees * gathered], axis=1)
    busy = np.flatnonzero(result.numels > 0)
    if not len(busy):
        return [], np.full(len(rows), -1)
    unique, first, place = np.unique(rows[busy], axis=0, return_index=True, return_inverse=True)
    index = np.full(len(rows), -1)
    index[busy] = place.reshape(-1)
    pattern = "".join(a for a in AXES if getattr(split.config, a) > 1)
    head = f"{_described(layer)} split={pattern} dx={int(input_gradient)} {dtype}"
    head += " gather" if gathered else ""
    found = []
    for row, rank in zip(unique, busy[first], strict=True):
        config, own_rank = _config_at(split, int(rank))
        key = f"{head} {_shapes_text(row, layouts)}"
        world = split.world if split.stack is None else split.world // len(split.stack.configs)
        found.append(Work(key, layer, config, world, own_rank, input_gradient))
    return found, index


def _config_at(split: Split, rank: int) -> tuple[Config, int]:
    """The config and the rank inside it, where several configs stand side by side."""
    if split.stack is None:
        return split.config, rank
    world = split.world // len(split.stack.configs)
    return split.stack.configs[rank // world], rank % world


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
class TimeTable:
    """Measured seconds by share of a layer, for one kind of device; kept in a JSON file."""

    device: str
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def path(cls, device: str) -> Path:
        """Where the times of a device are kept; SHARDWISE_CACHE names another folder."""
        home = os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise"
        safe = "".join(c if c.isalnum() else "-" for c in device)
        return Path(home) / f"times-{safe}.json"

    @classmethod
    def load(cls, device: str) -> TimeTable:
        path = cls.path(device)
        if not path.exists():
            return cls(device)
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r} is not {FORMAT!r}")
            times = {key: (float(a), float(b)) for key, (a, b) in data["seconds"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ShardwiseError(
                f"the measured times in {str(path)!r} cannot be read ({error}); remove the file "
                "and probe again"
            ) from None
        return cls(device, times)

    def save(self) -> None:
        """Adds these times to those on disk, where another may have put some meanwhile."""
        path = self.path(self.device)
        try:
            with alone_with(path):
                known = TimeTable.load(self.device).seconds
                data = {"format": FORMAT, "device": self.device, "seconds": known | self.seconds}
                write_whole(path, json.dumps(data))
        except OSError as error:
            raise ShardwiseError(
                f"the measured times cannot be kept in {str(path)!r}: {error.strerror or error}"
            ) from None

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
    """Layers that read only the model's inputs, so that no gradient flows on from them."""
    trained: set[str] = set()
    for layer in graph.layers:
        if layer.params or any(name in trained for name in layer.inputs):
            trained.add(layer.name)
    return frozenset(
        layer.name for layer in graph.layers if not any(name in trained for name in layer.inputs)
    )


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
