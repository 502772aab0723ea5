"""`shardwise.plan`: from a model and a cluster to a plan that explains itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.cluster.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.geometry.grid import Config
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import capture
from shardwise.model.torch_export import as_sizes
from shardwise.planner.best_plan import Planner, Prediction, baselines, predict
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Timer, Training
from shardwise.planner.layer_times import timer_for
from shardwise.planner.recompute import all_again, check_choice, fitted
from shardwise.planner.several_sizes import for_all_sizes
from shardwise.planner.shown_plan import as_text
from shardwise.planner.simulate import simulate
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.units import parse_size

HIDDEN = (0.0, 0.5, 1.0)  # parts of the updates that may overlap with the backward pass
SIMULATED = 256  # workers up to which several plans are simulated and compared


@dataclass(frozen=True)
class Alternative:
    """One config of a layer, all other layers as planned; seconds."""

    config: Config
    transfer: float  # of what the layer reads, and inside it
    compute: float
    update: float
    onward: float  # carrying its output to its readers

    @property
    def total(self) -> float:
        return self.transfer + self.compute + self.update + self.onward

    @property
    def is_pure(self) -> bool:
        """Whether one axis only is split, over ranks that are close together."""
        split = [degree for degree in self.config.degrees if degree > 1]
        first = self.config.ranks == tuple(range(self.config.num_workers))
        return len(split) <= 1 and first and self.config.gradient == "sum"


@dataclass(frozen=True)
class Rival:
    """A plan to compare with."""

    plan: Plan
    prediction: Prediction
    step_seconds: float  # simulated


@dataclass(frozen=True, eq=False)
class Findings:
    """What is known about a plan: its costs, its simulated step, and what others would cost."""

    costs: Costs
    plan: Plan
    prediction: Prediction
    trace: Trace
    rivals: dict[str, Rival] = field(default_factory=dict)

    def explain(self, name: str) -> list[Alternative]:
        """The alternatives for one layer with their costs, best first, as P4's Tables 2 and 3."""
        graph, costs = self.costs.graph, self.costs
        if name not in graph or graph[name].is_input:
            close = get_close_matches(name, [la.name for la in graph.layers], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PlanError(f"the model has no layer {name!r} to explain{hint}")
        layer, own = graph[name], costs.of(graph[name])
        reading, onward = np.zeros((2, len(own.configs)))
        for index, source in costs.sources[name]:
            chosen = self.plan.config(source, graph)
            ends = [(chosen, config) for config in own.configs]
            reading += [costs.transfer(source, layer, index, pair)[0] for pair in ends]
        for reader in map(graph.__getitem__, graph.consumers[name]):
            chosen = self.plan.config(reader, graph)
            ends = [(config, chosen) for config in own.configs]
            for index, source in costs.sources[reader.name]:
                if source is layer:
                    onward += [costs.transfer(layer, reader, index, pair)[0] for pair in ends]
        wanted = np.ones(len(own.configs), dtype=bool)
        if name in graph.outputs:
            onward += costs.output_table(layer).seconds[own.outputs.index, 0]
            wanted = ~costs.unwanted(layer, own.outputs)[own.outputs.index]
        found = [
            Alternative(
                config,
                float(reading[i] + own.transfer[i]),
                float(own.compute[i]),
                float(own.update[i]),
                float(onward[i]),
            )
            for i, config in enumerate(own.configs)
            if wanted[i]
        ]
        return sorted(found, key=lambda alternative: alternative.total)

    def text(self) -> str:
        """The plan as plain columns: splits and predicted costs, totals, and the rivals'."""
        return as_text(replace(self.plan, findings=self))


def plan(
    model: nn.Module | LayerGraph,
    *inputs: torch.Tensor,
    cluster: str | Cluster = "local",
    workers: int | None = None,
    memory: str | int | None = None,
    training: Training | None = None,
    timer: Timer | None = None,
    gradients: Engine | str | None = None,
    inference: bool = False,
    sizes: Sequence[Any] = (),
    recompute: str = "none",
) -> Plan:
    """The best plan for a model on a cluster; it prints as a table and explains its choices.

    `cluster` is a description, a preset ("p100-4x4"), a shorthand ("4x10Gb") or a file; `memory`
    caps what a worker may use ("8GiB"). With inference=True only the forward pass costs time, and
    nothing is kept for a backward pass. `sizes` are shapes of other inputs to plan for: each gets
    the splits that are best for it, and what lies between them those of the nearest. With
    recompute="auto" the backward pass may compute layers again where `memory` asks for it, with
    "all" it computes again whatever frees memory.

    >>> plan(model, x, cluster="4x10Gb").explain("fc1")
    """
    if inference:
        training = training or Training.none()
    graph, modes = model, {"training": not inference, "sizes_vary": inference or bool(sizes)}
    if not isinstance(graph, LayerGraph):
        graph = capture(graph, *inputs, **modes)
    if inference and graph.training:
        raise PlanError("the graph is of training: capture(..., training=False) is for inference")
    machines = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    machines = machines.with_workers(machines.world if workers is None else workers)
    each = [
        Costs(own, machines, timer or timer_for(machines, own), training)
        for own in of_sizes(graph, sizes)
    ]
    cap = machines.device.memory if memory is None else memory
    cap = parse_size(cap) if isinstance(cap, str) else cap
    return best_plan(each, gradients, cap, recompute)


def of_sizes(graph: LayerGraph, sizes: Sequence[Any]) -> list[LayerGraph]:
    """A graph, and those of the same model for inputs of other shapes."""
    if sizes and graph.origin is None:
        raise PlanError("plans for several sizes are made from a model, not from a graph")
    shapes = [as_sizes(size, len(graph.inputs)) for size in sizes]
    return [graph, *(graph.origin.graphs(graph.training, shape) for shape in shapes)]


def best_plan(
    each: Sequence[Costs],
    gradients: Engine | str | None = None,
    cap: int | None = None,
    recompute: str = "none",
) -> Plan:
    """The best plan for one size of inputs, or for several, with all that is known about it."""
    check_choice(recompute)
    if len(each) == 1:
        return examine(each[0], gradients, cap=cap, recompute=recompute)
    plans = []
    for costs in each:
        try:
            plans.append(examine(costs, gradients, cap=cap, recompute=recompute))
        except PlanError as error:
            shapes = [costs.graph[name].shape for name in costs.graph.inputs]
            sizes = ", ".join("x".join(map(str, shape)) for shape in shapes)
            raise PlanError(f"for input {sizes}, {error}") from None

    def fitted(plan: Plan, costs: Costs) -> Plan:
        own = Plan.make(costs.graph, costs.world, lambda layer: plan.config(layer, costs.graph))
        return examine(costs, gradients, chosen=own)

    return for_all_sizes(plans, cap, fitted)


def examine(
    costs: Costs,
    gradients: Engine | str | None = None,
    cap: int | None = None,
    chosen: Plan | None = None,
    recompute: str = "none",
) -> Plan:
    """The best plan, or the given one, with all that is known about it."""
    planner, steps = Planner(costs), _Steps(costs, Engine.of(gradients))
    few = costs.world <= SIMULATED
    rivals = {
        name: Rival(rival, prediction, steps.of(rival).seconds if few else 0.0)
        for name, (rival, prediction) in baselines(costs).items()
    }
    if chosen is None:
        candidates = _candidates(planner, cap, recompute)
        if few and recompute != "all":
            fitting = [r.plan for r in rivals.values() if cap is None or r.prediction.memory <= cap]
            candidates += fitting
        if few:
            seconds = [steps.of(candidate).seconds for candidate in candidates]
        else:
            seconds = [predict(candidate, costs).seconds for candidate in candidates]
        chosen = candidates[int(np.argmin(seconds))]
    findings = Findings(costs, chosen, predict(chosen, costs), steps.of(chosen), rivals)
    return replace(chosen, findings=findings)


def _candidates(planner: Planner, cap: int | None, recompute: str) -> list[Plan]:
    """The best plans, for different parts of the updates that overlap hides."""
    costs, trains = planner.costs, planner.costs.training.gradients
    plans = [planner.best(hidden) for hidden in (HIDDEN if trains else HIDDEN[:1])]
    if recompute == "all" and trains:
        plans = [all_again(plan, costs) for plan in plans]
    if cap is None:
        return plans
    fitting = [plan for plan in plans if predict(plan, costs).memory <= cap]
    if recompute == "none" or not trains or fitting:
        return fitting if recompute == "all" and fitting else [planner.under(cap)[0], *fitting]
    return _fitted(planner, cap, plans)


def _fitted(planner: Planner, cap: int, plans: Sequence[Plan]) -> list[Plan]:
    """Plans that fit by their splits, or by what they compute again."""
    costs, least = planner.costs, planner.least_memory()[0]
    found = [fitted(replace(plan, recompute=()), costs, cap) for plan in (*plans, least)]
    fitting = [plan for plan in found if plan is not None]
    try:
        return [planner.under(cap)[0], *fitting]
    except PlanError:
        if not fitting:
            raise
    return fitting


class _Steps:
    """The simulated steps of plans, each found out once: several ways lead to the same plan."""

    def __init__(self, costs: Costs, gradients: Engine) -> None:
        self.costs, self.gradients = costs, gradients
        self._known: dict[Hashable, Trace] = {}

    def of(self, plan: Plan) -> Trace:
        if (key := (plan.recompute, *plan.layers.items())) not in self._known:
            costs = self.costs
            self._known[key] = simulate(
                plan, costs.graph, costs.cluster, costs.timer, costs.training, self.gradients
            )
        return self._known[key]
