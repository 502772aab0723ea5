"""A plan: one config per layer, as frozen data that reads and writes JSON."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardwise.errors import PlanError
from shardwise.files import write_whole
from shardwise.geometry.grid import AXES, Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES
from shardwise.plans.fitting import fit, random_config
from shardwise.plans.plan_file import FLOAT, parsed_plans, plan_text
from shardwise.plans.segments import Segments, check_segments, segment_numbers

Shapes = tuple[tuple[int, ...], ...]  # of all inputs


MOST_NAMED = 3  # layers without a strategy


@dataclass(frozen=True)
class Plan:
    """How every layer of one model is split over `world` workers.

    It was made for inputs of one size, and is fitted to others. `others` are plans for some of
    these: the one whose size is nearest rules.

    >>> from shardwise import capture, zoo
    >>> plan = Plan.uniform(capture(zoo.build("digits"), torch.zeros(8, 1, 8, 8)), n=2, h=2)
    >>> plan.world
    4
    """

    world: int
    layers: Mapping[str, Config]
    inputs: Shapes  # that it was made for
    signature: str  # of the graph the plan was made for
    whole: tuple[str, ...] = field(default=())  # layers with no strategy: one worker computes them
    dtypes: tuple[str, ...] = field(default=())  # of inputs: "float" is that of the parameters
    others: tuple[Plan, ...] = field(default=())  # for inputs of other sizes
    training: bool = True  # it was made for training, or for inference only
    recompute: Segments = field(default=())  # what the backward pass computes again
    findings: Any = field(default=None, repr=False, compare=False)  # costs, where it was planned

    # -- making plans --------------------------------------------------------------------------

    @classmethod
    def make(cls, graph: LayerGraph, world: int, choose: Callable[[Layer], Config]) -> Plan:
        """The plan that gives every layer the config `choose` returns, checked."""
        plan = cls(
            world=world,
            layers={layer.name: choose(layer) for layer in graph.layers},
            inputs=_input_shapes(graph),
            signature=graph.signature,
            whole=tuple(layer.name for layer in graph.layers if not STRATEGIES[layer.op].known),
            dtypes=tuple(_dtype_name(graph[name].dtype) for name in graph.inputs),
            training=graph.training,
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
        """Raises where this plan does not fit this model; to other sizes of inputs it is fitted."""
        for name in self.layers:
            if name not in graph:
                raise PlanError(f"the plan names layer {name!r}, which {_nearest(name, graph)}")
        for layer in graph.layers:
            if layer.name not in self.layers:
                raise PlanError(f"the plan has no entry for layer {layer.name!r} ({layer.op})")
        if self.signature != graph.signature:
            raise PlanError(
                f"the plan was made for another model (network {self.signature}) than this one "
                f"(network {graph.signature})"
            )
        check_segments(self.recompute, graph)
        if _image_sizes(self.inputs) == _image_sizes(_input_shapes(graph)):
            for layer in graph.layers:
                STRATEGIES[layer.op].check(layer, self.layers[layer.name], self.world)

    def of_size(self, inputs: Shapes) -> Plan:
        """The plan that rules for inputs of this size: this one, or one of `others`."""
        return min((self, *self.others), key=lambda plan: _distance(plan.inputs, inputs))

    def config(self, layer: Layer, graph: LayerGraph) -> Config:
        """The config of a layer of this graph."""
        return self.configs(graph)[layer.name]

    def configs(self, graph: LayerGraph) -> Mapping[str, Config]:
        """The config of every layer of a graph; what the plan does not name follows what it reads.

        The graph of evaluation may have layers that the graph of training has not, and another
        batch or image may be too small for a split.
        """
        plan = self.of_size(_input_shapes(graph)) if self.others else self
        known = plan._fitted.get(graph)
        if known is None or known[0] != plan.layers:  # a table that somebody may write into
            known = plan._fitted[graph] = dict(plan.layers), plan._fit(graph)
        return known[1]

    def segments(self, graph: LayerGraph) -> Mapping[str, int]:
        """The segment of every layer of a graph that the backward pass computes again."""
        return segment_numbers(self.of_size(_input_shapes(graph)).recompute, graph)

    def _fit(self, graph: LayerGraph) -> Mapping[str, Config]:
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
        return found

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
        return self._known.explain(layer)

    def why_not(self, layer: str, split: str | Config) -> Any:
        """What it would cost to give a layer this split ("h=4"), everything else solved anew."""
        return self._known.why_not(layer, split)

    def diff(self, other: Plan) -> Any:
        """What another plan of the same model costs more, by layer and kind of cost."""
        return self._known.diff(other)

    @property
    def _known(self) -> Any:
        if self.findings is None:
            raise PlanError("only a plan that shardwise.plan has made or examined explains itself")
        return self.findings

    # -- files ---------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The plan as text that a person can edit."""
        return plan_text(self)

    @classmethod
    def from_json(cls, text: str, where: str = "the plan") -> Plan:
        """Reads a plan and says which field is wrong where one is."""
        own, *others = parsed_plans(text, where)
        return cls(**own, others=tuple(cls(**other) for other in others))

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


def _input_shapes(graph: LayerGraph) -> Shapes:
    return tuple(graph[name].shape for name in graph.inputs)


def _image_sizes(inputs: Shapes) -> Shapes:
    """The shapes of inputs without their samples."""
    return tuple(shape[1:] for shape in inputs)


def _distance(mine: Shapes, given: Shapes) -> float:
    """How far two sizes of inputs are apart: every dimension by its ratio, samples count least."""
    ratios = [
        abs(log(max(a, 1) / max(b, 1))) * (1.0 if dim else 1e-3)
        for shape, other in zip(mine, given, strict=True)
        for dim, (a, b) in enumerate(zip(shape, other, strict=False))
    ]
    return sum(ratios)


def _config(degrees: Mapping[str, int]) -> Config:
    """A config of these degrees; an axis that does not exist is named."""
    for axis in degrees:
        if axis not in AXES:
            raise PlanError(f"there is no axis {axis!r} to split; the axes are {', '.join(AXES)}")
    return Config(**dict(degrees))  # type: ignore[arg-type]


def _dtype_name(dtype: torch.dtype) -> str:
    return FLOAT if dtype.is_floating_point else str(dtype).removeprefix("torch.")


def _nearest(name: str, graph: LayerGraph) -> str:
    close = get_close_matches(name, graph.by_name, n=1)
    return f"the model does not have (nearest: {close[0]!r})" if close else "the model has not"
