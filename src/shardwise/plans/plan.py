"""A plan: one config per layer, as frozen data that reads and writes JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.errors import PlanError
from shardwise.files import first_mistake, write_whole
from shardwise.geometry.grid import AXES, Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES

FORMAT = "shardwise-plan-1"
FLOAT = "float"  # an input of the same type as the parameters


MOST_NAMED = 3  # layers without a strategy


@dataclass(frozen=True)
class Plan:
    """How every layer of one model is split over `world` workers.

    >>> from shardwise import capture, zoo
    >>> plan = Plan.uniform(capture(zoo.build("digits"), torch.zeros(8, 1, 8, 8)), n=2, h=2)
    >>> plan.world
    4
    """

    world: int
    layers: Mapping[str, Config]
    inputs: tuple[tuple[int, ...], ...]  # the shapes the model was captured for
    signature: str  # of the graph the plan was made for
    whole: tuple[str, ...] = field(default=())  # layers with no strategy: one worker computes them
    dtypes: tuple[str, ...] = field(default=())  # of inputs: "float" is that of the parameters
    findings: Any = field(default=None, repr=False, compare=False)  # costs, where it was planned

    # -- making plans --------------------------------------------------------------------------

    @classmethod
    def make(cls, graph: LayerGraph, world: int, choose: Callable[[Layer], Config]) -> Plan:
        """The plan that gives every layer the config `choose` returns, checked."""
        plan = cls(
            world=world,
            layers={layer.name: choose(layer) for layer in graph.layers},
            inputs=tuple(graph[name].shape for name in graph.inputs),
            signature=graph.signature,
            whole=tuple(layer.name for layer in graph.layers if not STRATEGIES[layer.op].known),
            dtypes=tuple(_dtype_name(graph[name].dtype) for name in graph.inputs),
        )
        plan.check(graph)
        return plan

    @classmethod
    def uniform(cls, graph: LayerGraph, world: int | None = None, **degrees: int) -> Plan:
        """The same split for every layer; where a layer has no such axis, see `fit`."""
        wanted = _config(degrees)
        workers = world or wanted.num_workers
        return cls.make(graph, workers, lambda layer: fit(layer, wanted, graph.batch))

    @classmethod
    def owt(cls, graph: LayerGraph, world: int) -> Plan:
        """One weird trick: convolutions over samples, fully connected layers over filters (P4)."""
        after: set[str] = set()
        for layer in graph.layers:
            flat = len(layer.shape) == 2 and any(name in after for name in layer.inputs)
            if STRATEGIES[layer.op].fully_connected or flat:
                after.add(layer.name)

        def choose(layer: Layer) -> Config:
            split = Config(f=world) if layer.name in after else Config(n=world)
            return fit(layer, split, graph.batch)

        return cls.make(graph, world, choose)

    @classmethod
    def random(cls, graph: LayerGraph, world: int, seed: int) -> Plan:
        """Random legal configs, fewer workers and any order of ranks included."""
        generator = random.Random(seed)
        return cls.make(graph, world, lambda layer: random_config(layer, world, generator))

    # -- checking ------------------------------------------------------------------------------

    def check(self, graph: LayerGraph) -> None:
        """Raises where this plan does not fit this model or this shape."""
        for name in self.layers:
            if name not in graph:
                raise PlanError(f"the plan names layer {name!r}, which {_nearest(name, graph)}")
        for layer in graph.layers:
            if layer.name not in self.layers:
                raise PlanError(f"the plan has no entry for layer {layer.name!r} ({layer.op})")
            STRATEGIES[layer.op].check(layer, self.layers[layer.name], self.world)
        if self.signature != graph.signature:
            shapes = ", ".join("x".join(map(str, graph[name].shape)) for name in graph.inputs)
            made_for = ", ".join("x".join(map(str, shape)) for shape in self.inputs)
            raise PlanError(
                f"the plan was made for another model or input shape (input {made_for}, network "
                f"{self.signature}) than this one (input {shapes}, network {graph.signature})"
            )

    def config(self, layer: Layer, graph: LayerGraph) -> Config:
        """The config of a layer of this graph."""
        return self.configs(graph)[layer.name]

    def configs(self, graph: LayerGraph) -> Mapping[str, Config]:
        """The config of every layer of a graph; what the plan does not name follows what it reads.

        The graph of evaluation may have layers that the graph of training has not, and another
        batch may be too small for a split.
        """
        known = self._fitted.get(graph)
        if known is None or known[0] != self.layers:  # a table that somebody may write into
            found: dict[str, Config] = {}
            for layer in graph.layers:
                config = self.layers.get(layer.name)
                if config is None:
                    sources = [found[name] for name in layer.inputs]
                    config = fit(layer, sources[0] if sources else Config(), graph.batch)
                try:
                    STRATEGIES[layer.op].check(layer, config, self.world)
                except PlanError:
                    config = fit(layer, config, graph.batch)
                found[layer.name] = config
            known = self._fitted[graph] = dict(self.layers), found
        return known[1]

    @cached_property
    def _fitted(self) -> WeakKeyDictionary[LayerGraph, tuple[Any, Mapping[str, Config]]]:
        return WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fitted"}

    @property
    def input_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Of every input; None where it is that of the parameters."""
        return tuple(None if name == FLOAT else getattr(torch, name) for name in self.dtypes)

    def explain(self, layer: str) -> Any:
        """The alternatives for one layer with their costs, best first."""
        if self.findings is None:
            raise PlanError("only a plan that shardwise.plan has made or examined explains itself")
        return self.findings.explain(layer)

    # -- files ---------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The plan as text that a person can edit: degrees of 1 and obvious ranks are left out."""
        layers = {}
        for name, config in self.layers.items():
            entry: dict[str, Any] = {
                axis: degree
                for axis, degree in zip(AXES, config.degrees, strict=True)
                if degree > 1
            }
            if config.ranks != tuple(range(config.num_workers)):
                entry["ranks"] = list(config.ranks)
            if config.gradient != "sum":
                entry["gradient"] = config.gradient
            layers[name] = entry
        head = {
            "format": FORMAT,
            "world": self.world,
            "inputs": [list(shape) for shape in self.inputs],
            "signature": self.signature,
            "whole": list(self.whole),
        }
        if any(name != FLOAT for name in self.dtypes):
            head["dtypes"] = list(self.dtypes)
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        rows = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in layers.items()]
        body = ",\n".join(rows)
        return "\n".join(["{", *lines, '  "layers": {', body, "  }", "}", ""])

    @classmethod
    def from_json(cls, text: str, where: str = "the plan") -> Plan:
        """Reads a plan and says which field is wrong where one is."""
        try:
            data = _PlanFile.model_validate_json(text)
        except ValidationError as error:
            raise PlanError(f"{where}: {first_mistake(error)}") from None
        if data.format != FORMAT:
            raise PlanError(f"{where}: format {data.format!r} is not {FORMAT!r}")
        layers = {}
        for name, entry in data.layers.items():
            try:
                layers[name] = Config(**entry.model_dump())
            except ValueError as error:
                raise PlanError(f"{where}: layer {name!r}: {error}") from None
        inputs = tuple(tuple(shape) for shape in data.inputs)
        dtypes = tuple(data.dtypes) or (FLOAT,) * len(inputs)
        if len(dtypes) != len(inputs):
            raise PlanError(f"{where}: dtypes names {len(dtypes)} of {len(inputs)} inputs")
        return cls(data.world, layers, inputs, data.signature, tuple(data.whole), dtypes)

    def save(self, path: str | Path) -> None:
        try:
            write_whole(path, self.to_json())
        except OSError as error:
            raise PlanError(f"the plan file {str(path)!r} cannot be written: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan file {str(path)!r} cannot be read: {error}") from None
        return cls.from_json(text, where=f"plan file {str(path)!r}")

    def __str__(self) -> str:
        if self.findings is not None:
            return self.findings.text()
        width = max(map(len, self.layers), default=0)
        rows = [f"plan for {self.world} workers, network {self.signature}"]
        for name, config in self.layers.items():
            note = "  (no strategy: one worker)" if name in self.whole else ""
            rows.append(f"  {name:<{width}}  {config}{note}")
        return "\n".join([*rows, *self.idle()])

    @property
    def main_split(self) -> str:
        """The split of most layers."""
        splits = [str(config) for config in self.layers.values()]
        return max(set(splits), key=splits.count)

    def idle(self) -> list[str]:
        """A line about workers that have nothing to do, for want of a strategy say."""
        used = max((config.num_workers for config in self.layers.values()), default=1)
        waits = f"{self.world - 1} of {self.world} workers wait meanwhile"
        if used < self.world:
            waits = f"no layer uses more than {used} of {self.world} workers"
        if self.world == 1 or not (self.whole or used < self.world):
            return []
        if not self.whole:
            return [f"{waits}: more would take longer, or there is nothing more to split"]
        rows = self.findings.prediction.rows if self.findings is not None else ()
        ops = {row.layer: row.op for row in rows}
        named = [
            f"{ops[name]} (layer {name!r})" if name in ops else repr(name) for name in self.whole
        ]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        runs = "runs" if len(named) == 1 else "run"
        what = f"{', '.join(named[:MOST_NAMED])}{more} {runs}"
        return [f"no strategy: {what} whole on one worker; {waits}"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    n: int = Field(1, ge=1)
    d: int = Field(1, ge=1)
    h: int = Field(1, ge=1)
    w: int = Field(1, ge=1)
    f: int = Field(1, ge=1)
    c: int = Field(1, ge=1)
    ranks: tuple[int, ...] = ()
    gradient: str = "sum"


class _PlanFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: str
    world: int = Field(ge=1)
    inputs: list[list[int]]
    signature: str
    whole: list[str] = []
    dtypes: list[
        Literal[
            "float", "bool", "int8", "int16", "int32", "int64", "uint8", "complex64", "complex128"
        ]
    ] = []
    layers: dict[str, _Entry]


def fit(layer: Layer, wanted: Config, batch: int) -> Config:
    """The legal config nearest to a wanted split.

    What an axis cannot take moves on: input channels to filters, everything else to samples. What
    then finds no room is dropped, so that fewer workers are used.
    """
    strategy = STRATEGIES[layer.op]
    limits = strategy.limits(layer, batch)
    degrees: dict[str, int] = dict(zip(AXES, wanted.degrees, strict=True))
    if strategy.joint_channels and "f" in limits and degrees["f"] * degrees["c"] > limits["f"]:
        degrees["f"], degrees["c"] = degrees["f"] * degrees["c"], 1
    for axis, fallback in (("c", "f"), ("d", "n"), ("h", "n"), ("w", "n"), ("f", "n"), ("n", "")):
        kept = _largest_divisor(degrees[axis], limits.get(axis, 1))
        if fallback:
            degrees[fallback] *= degrees[axis] // kept
        degrees[axis] = kept
    used = prod(degrees.values())
    ranks = wanted.ranks if used == len(wanted.ranks) else tuple(sorted(wanted.ranks))[:used]
    return Config(**degrees, ranks=ranks)  # type: ignore[arg-type]


def _config(degrees: Mapping[str, int]) -> Config:
    """A config of these degrees; an axis that does not exist is named."""
    for axis in degrees:
        if axis not in AXES:
            raise PlanError(f"there is no axis {axis!r} to split; the axes are {', '.join(AXES)}")
    return Config(**dict(degrees))  # type: ignore[arg-type]


def _dtype_name(dtype: torch.dtype) -> str:
    return FLOAT if dtype.is_floating_point else str(dtype).removeprefix("torch.")


def _largest_divisor(number: int, limit: int) -> int:
    return next(k for k in range(min(number, max(limit, 1)), 0, -1) if number % k == 0)


def random_config(layer: Layer, world: int, generator: random.Random) -> Config:
    """A random legal config: random degrees whose product fits, on random ranks."""
    strategy = STRATEGIES[layer.op]
    limits = strategy.axes(layer)
    degrees, room = {}, generator.randint(1, world)
    for axis in generator.sample(list(limits), len(limits)):
        limit = room if axis == "n" else min(room, max(limits[axis], 1))
        degrees[axis] = generator.randint(1, limit)
        room //= degrees[axis]
    if strategy.joint_channels and "f" in limits:
        size = layer.shape[layer.dims.index("c")] if "c" in layer.dims else 1
        if degrees["f"] * degrees["c"] > size:
            degrees["c"] = 1
    ranks = tuple(generator.sample(range(world), prod(degrees.values())))
    return Config(**degrees, ranks=ranks)


def _nearest(name: str, graph: LayerGraph) -> str:
    close = get_close_matches(name, graph.by_name, n=1)
    return f"the model does not have (nearest: {close[0]!r})" if close else "the model has not"
