"""The best plan for a model on a cluster, and what any plan is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwise.errors import PlanError, ShardwiseError
from shardwise.geometry.grid import Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.candidates import most_workers
from shardwise.planner.costs import Costs
from shardwise.planner.memory import SLACK, SegmentMemory
from shardwise.planner.search import Problem, Solution, solve
from shardwise.plans.fitting import fit
from shardwise.plans.plan import Plan
from shardwise.plans.program import handed_out


@dataclass(frozen=True)
class PlannedLayer:
    """What one layer is predicted to cost under its config, in seconds and bytes."""

    layer: str
    op: str
    config: Config
    compute: float
    transfer: float  # of what it reads, forward and backward, and inside it
    update: float
    moved: int
    memory: int  # weights, gradients, optimizer and saved activations on its fullest rank

    @property
    def total(self) -> float:
        return self.compute + self.transfer + self.update


@dataclass(frozen=True)
class Prediction:
    """The predicted costs of a plan, layer by layer (P4, equation 1)."""

    rows: tuple[PlannedLayer, ...]
    memory: int  # the most that any rank holds at once
    held: tuple[int, ...] = ()  # the same for each rank

    @cached_property
    def compute(self) -> float:
        return sum(row.compute for row in self.rows)

    @cached_property
    def transfer(self) -> float:
        return sum(row.transfer for row in self.rows)

    @cached_property
    def update(self) -> float:
        return sum(row.update for row in self.rows)

    @cached_property
    def seconds(self) -> float:
        return sum(row.total for row in self.rows)

    @cached_property
    def moved(self) -> int:
        return sum(row.moved for row in self.rows)


# -- prediction ------------------------------------------------------------------------------------


def predict(plan: Plan, costs: Costs) -> Prediction:
    """What this plan costs, from the same functions that the search minimises; found out once."""
    key = (plan.world, plan.recompute, *plan.layers.items())
    if key not in costs.predictions:
        costs.predictions[key] = _Appraised(plan, costs).prediction()
    return costs.predictions[key]


class _Appraised:
    """A plan whose layers are looked at one by one."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.costs, self.graph, self.world = costs, costs.graph, plan.world
        self.configs = plan.configs(costs.graph)
        self.segments = SegmentMemory.of(plan, costs.memory)
        self.again = {name: each for each in self.segments for name in each.layers}

    def prediction(self) -> Prediction:
        graph, rows, working = self.graph, [], np.zeros(self.world)
        stored = sum((segment.kept for segment in self.segments), np.zeros(self.world))
        for layer in map(graph.by_name.__getitem__, self.costs.sources):
            row, buffers = self._row(layer)
            rows.append(row)
            weights, saved, while_running = self.costs.memory.of(self._split(layer))
            segment = self.again.get(layer.name)
            stored += weights + (saved if segment is None else 0.0)
            running = while_running + buffers + self._waiting(layer)
            running += 0.0 if segment is None else segment.there_again
            working = np.maximum(working, running)
        outputs = [graph[name] for name in graph.outputs if name not in graph.inputs]
        rows += map(self._output_row, outputs)
        working = np.maximum(working, sum(map(self._returned, outputs)))
        held = tuple(round(SLACK * float(nbytes)) for nbytes in stored + working)
        return Prediction(tuple(rows), max(held), held)

    def _split(self, layer: Layer) -> Split:
        return Split.of(self.costs.alike(layer), self.configs[layer.name], self.world)

    def _row(self, layer: Layer) -> tuple[PlannedLayer, np.ndarray]:
        """What a layer costs, and the bytes per rank of what arrives for it."""
        costs, config = self.costs, self.configs[layer.name]
        own, place = costs.at(layer, config)
        transfer, moved = float(own.transfer[place]), float(own.moved[place])
        buffers = np.zeros(self.world)
        for index, source in costs.sources[layer.name]:
            ends = self.configs[source.name], config
            seconds, nbytes = costs.transfer(source, layer, index, ends)
            transfer, moved = transfer + seconds, moved + nbytes
            if nbytes > 0:
                buffers += costs.memory.moving(self._split(source), self._split(layer), index)
        called = layer.traits.called or layer.op
        again = layer.name in self.again
        compute = float(own.compute[place]) + again * float(own.forward[place])
        times = compute, transfer, float(own.update[place])
        memory = round(float((own.stored if again else own.memory)[place]))
        return PlannedLayer(layer.name, called, config, *times, round(moved), memory), buffers

    def _waiting(self, layer: Layer) -> np.ndarray:
        """Bytes per rank of what waits for later layers, where no backward pass keeps it anyway."""
        training, found = self.costs.training, np.zeros(self.world)
        for other in () if training.gradients else self.costs.memory.waiting[layer.name]:
            found += STRATEGIES[other.op].output(self._split(other)).numels * training.itemsize
        return found

    def _returned(self, layer: Layer) -> np.ndarray:
        """Bytes per rank of an output: its part, and what the user gets."""
        held = STRATEGIES[layer.op].output(self._split(layer))
        transfer = handed_out(held, self.costs.training.output)
        given = 0 if transfer is None else transfer.target.numels
        return (held.numels + given) * float(self.costs.training.itemsize)

    def _output_row(self, layer: Layer) -> PlannedLayer:
        """Handing out an output: to all ranks, for the user's loss."""
        own, place = self.costs.at(layer, self.configs[layer.name])
        table = self.costs.output_table(layer, own.outputs.one(place))
        seconds, moved = float(table.seconds[0, 0]), round(float(table.nbytes[0, 0]))
        name = f"output of {layer.name}"
        return PlannedLayer(name, "gather", Config(), 0.0, seconds, 0.0, moved, 0)


def wanted(plan: Plan, costs: Costs) -> bool:
    """Whether every rank gets all classes of its part of the output, where its loss needs them."""
    for layer in map(costs.graph.__getitem__, costs.graph.outputs):
        own, place = costs.at(layer, plan.config(layer, costs.graph))
        if costs.unwanted(layer, own.outputs.one(place)).any():
            return False
    return True


# -- search ----------------------------------------------------------------------------------------


class Planner:
    """Finds plans that minimise the costs of a graph on a cluster."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.graph = costs, costs.graph
        self.layers = [layer for layer in self.graph.layers if not layer.is_input]
        if not self.layers:
            raise PlanError("the model computes nothing, so there is nothing to plan")
        if not costs.pins:
            most_workers({la.name: costs.of(la).configs for la in self.layers}, costs.world)
        self._solved: dict[tuple[float, float], Solution] = {}

    @cached_property
    def _reads(self) -> list[tuple[int, int, int]]:
        """Who reads whom: the places of both layers, and which operand it is."""
        place = {layer.name: i for i, layer in enumerate(self.layers)}
        return [
            (place[source.name], place[name], operand)
            for name, sources in self.costs.sources.items()
            for operand, source in sources
        ]

    @cached_property
    def _edges(self) -> list[tuple[int, int, np.ndarray]]:
        return [
            (u, v, self.costs.least_edge(self.layers[u], self.layers[v], operand))
            for u, v, operand in self._reads
        ]

    def problem(self, hidden: float = 0.0, price: float = 0.0) -> Problem:
        """The choice of a config per layer, as costs of nodes and edges.

        `hidden` is the part of the updates that overlaps with computation, `price` what a byte of
        memory costs.
        """
        vectors: dict[tuple[int, bool], np.ndarray] = {}
        nodes = []
        for layer in self.layers:
            costs, is_output = self.costs.of(layer), layer.name in self.graph.outputs
            key = (id(costs), is_output)
            if key not in vectors:
                update = costs.update * (1.0 - hidden)
                vector = costs.compute + costs.transfer + update + price * costs.memory
                if is_output:
                    index = costs.outputs.index
                    vector = vector + self.costs.output_table(layer).seconds[index, 0]
                    vector[self.costs.unwanted(layer, costs.outputs)[index]] = np.inf
                vectors[key] = vector
            nodes.append(vectors[key])
        return Problem(nodes, self._edges)

    def best(self, hidden: float = 0.0, price: float = 0.0) -> Plan:
        """The plan of least cost."""
        choices = self.solution(hidden, price).choices
        chosen = {
            layer.name: self.costs.of(layer).configs[choice]
            for layer, choice in zip(self.layers, choices, strict=True)
        }
        return complete(self.graph, self.costs.world, chosen)

    def solution(self, hidden: float = 0.0, price: float = 0.0) -> Solution:
        """The choices of least cost, and the bound that proves it; found out once."""
        if (hidden, price) not in self._solved:
            found = solve(self.problem(hidden, price))
            while self._sharpen(found.choices):
                found = solve(self.problem(hidden, price))
            self._solved[hidden, price] = found
        return self._solved[hidden, price]

    def _sharpen(self, choices: Sequence[int]) -> bool:
        """Makes the costs of transfers between these choices exact; whether any was too low.

        On large clusters transfers are first judged by some of the ranks, which bounds them from
        below. Choices that are still the best when their own costs are exact are the best of all.
        """
        raised = [
            self.costs.sharpen(self.layers[u], self.layers[v], operand, choices[u], choices[v])
            for u, v, operand in self._reads
        ]
        return any(raised)

    def under(self, cap: int) -> tuple[Plan, Prediction]:
        """The best plan found whose ranks hold at most so many bytes: memory gets a price."""
        low = 0.0
        for high in self._prices:  # what layers work on has no price: a high one may need more
            best = self._priced(high)
            if best[1].memory <= cap:
                break
            low = high
        else:
            best = self.least_memory()
            if best[1].memory > cap:
                raise PlanError(self._does_not_fit(cap, best[1].memory))
            return best
        for _ in range(8 if low else 0):
            price = (low * high) ** 0.5
            found = self._priced(price)
            if found[1].memory <= cap:
                best, high = min(best, found, key=lambda each: each[1].seconds), price
            else:
                low = price
        return best

    def _priced(self, price: float) -> tuple[Plan, Prediction]:
        plan = self.best(price=price)
        return plan, predict(plan, self.costs)

    @cached_property
    def high_price(self) -> float:
        """A price at which time hardly counts."""
        each = [self.costs.of(layer) for layer in self.layers]
        seconds = sum(float(costs.total.max()) for costs in each)
        return 1e3 * seconds / max(1.0, sum(float(costs.memory.min()) for costs in each))

    @property
    def _prices(self) -> list[float]:
        """Nothing, then what hardly counts, up to what counts alone."""
        return [0.0, *(self.high_price / 4**k for k in range(18, -1, -1))]

    def least_memory(self) -> tuple[Plan, Prediction]:
        """The plan that needs least memory of those found: priced, unpriced and uniform ones."""
        found = [self._priced(price) for price in self._prices]
        known = baselines(self.costs).values()
        found += [rival for rival in known if self.costs.keeps_pins(rival[0].layers)]
        return min(found, key=lambda pair: pair[1].memory)

    def _does_not_fit(self, cap: int, least: int) -> str:
        text = (
            f"the model does not fit: a worker may use {size(cap)}, and the least that any plan "
            f"for {self.costs.world} workers needs is {size(least)}"
        )
        if self.costs.pins:
            return f"{text}, with {', '.join(map(repr, self.costs.pins))} pinned"
        for workers in _doublings(self.costs.world):
            try:
                cluster = self.costs.cluster.with_workers(workers)
                costs = Costs(self.graph, cluster, self.costs.timer, self.costs.training)
                found = Planner(costs).best(price=self.high_price)
            except ShardwiseError:  # the cluster has no room for so many, or no layer can use them
                break
            if predict(found, costs).memory <= cap:
                return f"{text}; it would fit on {workers} workers"
        return f"{text}; more workers do not help"


def _doublings(world: int) -> Iterator[int]:
    while (world := 2 * world) <= 256:
        yield world


def complete(graph: LayerGraph, world: int, chosen: Mapping[str, Config]) -> Plan:
    """A plan from the configs of all layers but the inputs, which follow their first readers."""

    def choose(layer: Layer) -> Config:
        if not layer.is_input:
            return chosen[layer.name]
        readers = [name for name in graph.consumers[layer.name] if name in chosen]
        return fit(layer, chosen[readers[0]] if readers else Config(), graph.batch)

    return Plan.make(graph, world, choose)


# -- what others would do --------------------------------------------------------------------------


def baselines(costs: Costs) -> dict[str, tuple[Plan, Prediction]]:
    """Well-known uniform plans, each at its own best degrees."""
    graph, world = costs.graph, costs.world
    found = {}
    for name, plans in {
        "sample (DDP)": [Plan.uniform(graph, world, n=min(world, graph.batch))],
        "sample, best degree": _uniform(costs, [("n",)]),
        "OWT": (Plan.owt(graph, k) for k in _counts(world)),
        "spatial": _uniform(costs, [("h",), ("w",), ("h", "w"), ("d", "h", "w")]),
        "uniform x (c)": _uniform(costs, [("c",)]),
        "uniform y (f)": _uniform(costs, [("f",)]),
        "uniform w (c x f)": _uniform(costs, [("c", "f")]),
        "one worker": [] if costs.training.gradients else [Plan.uniform(graph, world)],
    }.items():
        legal = [p for p in (replace(plan, world=world) for plan in plans) if wanted(p, costs)]
        if legal:
            each = [(plan, predict(plan, costs)) for plan in legal]
            found[name] = min(each, key=lambda pair: pair[1].seconds)
    if found["sample, best degree"][0] == found["sample (DDP)"][0]:
        del found["sample, best degree"]
    return found


def _counts(world: int) -> list[int]:
    counts = {k for k in range(1, world + 1) if world % k == 0}
    return sorted(counts | {1 << k for k in range(world.bit_length())}, reverse=True)


def _uniform(costs: Costs, splits: list[tuple[str, ...]]) -> Iterator[Plan]:
    """The same split for all layers over all workers; samples take what the axes leave."""
    graph, world = costs.graph, costs.world
    for axes in splits:
        if not set(axes) <= {*costs.candidates.spatial, "n", "c", "f"}:
            continue
        if axes == ("n",):
            for count in _counts(world):
                if count <= graph.batch:
                    yield Plan.uniform(graph, world, n=count)
            continue
        for degrees in _shares(world, len(axes)):
            samples = world // int(np.prod(degrees))
            if samples <= graph.batch:
                split = dict(zip(axes, degrees, strict=True))
                yield Plan.uniform(graph, world, n=samples, **split)


def _shares(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Degrees over so many axes, each at least 2, whose product divides the world."""
    if axes == 0:
        yield ()
        return
    for first in range(2, world + 1):
        if world % first == 0:
            for rest in _shares(world // first, axes - 1):
                yield (first, *rest)


def size(nbytes: float) -> str:
    """Bytes for people.

    >>> size(3 << 29)
    '1.5 GiB'
    >>> size(1000 << 20)
    '1000 MiB'
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            number = nbytes / scale
            return f"{number:.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
    return f"{nbytes:.0f} B"
