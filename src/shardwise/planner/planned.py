"""`shardwise.plan`: from a model and a cluster to a plan that explains itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
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
from shardwise.planner.best_plan import Planner, Prediction, baselines, predict, size
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Timer, Training
from shardwise.planner.layer_times import timer_for
from shardwise.planner.optimality import Optimality, least_cost
from shardwise.planner.pins import Pins, pinned, planned_layer
from shardwise.planner.plan_difference import PlanDifference
from shardwise.planner.recompute import all_again, check_choice, fitted
from shardwise.planner.several_sizes import for_all_sizes
from shardwise.planner.shown_plan import as_text
from shardwise.planner.simulated_steps import Steps
from shardwise.planner.why_not import WhyNot, why_not
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.plans.program import OUTPUTS
from shardwise.plans.trace import Trace
from shardwise.plans.uncollected import uncollected
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
    steps: Steps
    optimality: Optimality
    rivals: dict[str, Rival] = field(default_factory=dict)
    cap: int | None = None  # bytes that a worker may use
    hidden: float = 0.0  # the part of the updates that a search takes to be hidden to find this
    recompute: str = "none"  # what the backward pass may compute again

    def explain(self, name: str) -> list[Alternative]:
        """The alternatives for one layer with their costs, best first, as P4's Tables 2 and 3."""
        graph, costs = self.costs.graph, self.costs
        layer = planned_layer(graph, name, "to explain")
        own = costs.of(layer)
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

    def why_not(self, name: str, split: str | Config) -> WhyNot:
        """What it would cost to give a layer this split, everything else solved anew."""
        return why_not(self, name, split)

    def diff(self, other: Plan) -> PlanDifference:
        """What another plan of the same model costs more; one without findings gets these costs."""
        other.check(self.costs.graph)
        if other.findings is not None:
            return PlanDifference.between(self, other.findings)
        if other.world != self.costs.world:
            raise PlanError(
                f"the other plan is for {other.world} workers, and this one for {self.costs.world}"
            )
        found = {"prediction": predict(other, self.costs), "trace": self.steps.of(other)}
        return PlanDifference.between(self, replace(self, plan=other, **found))

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
    output: str = "full",
    sizes: Sequence[Any] = (),
    pins: Pins | None = None,
    recompute: str = "none",
) -> Plan:
    """The best plan for a model on a cluster; it prints as a table and explains its choices.

    `cluster` is a description, a preset ("p100-4x4"), a shorthand ("4x10Gb") or a file; `memory`
    caps what a worker may use ("8GiB"). With inference=True only the forward pass costs time, and
    nothing is kept for a backward pass. `output` is what `parallelize` will be given. `sizes` are
    shapes of other inputs to plan for: each gets the splits that are best for it, and what lies
    between them those of the nearest. `pins` fixes the splits of some layers, such as
    {"conv1": "h=4"}; the others are solved around them. With recompute="auto" the backward pass
    may compute layers again where `memory` asks for it, with "all" it computes again whatever frees
    memory.

    >>> plan(model, x, cluster="4x10Gb").explain("fc1")
    """
    training = training or _training(output, inference)
    graph = _graph(model, inputs, inference, bool(sizes))
    machines = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    machines = machines.with_workers(machines.world if workers is None else workers)
    memory = machines.device.memory if memory is None else memory
    cap = parse_size(memory) if isinstance(memory, str) else memory

    each = [
        pinned(Costs(part, machines, timer or timer_for(machines, part), training), pins or {})
        for part in of_sizes(graph, sizes)
    ]
    return best_plan(each, gradients, cap, recompute)


def _training(output: str, inference: bool) -> Training:
    if output not in OUTPUTS:
        raise PlanError(f"output {output!r} must be one of {', '.join(OUTPUTS)}")
    return Training.none(output) if inference else Training(output=output)


def _graph(
    model: nn.Module | LayerGraph, inputs: Sequence[torch.Tensor], inference: bool, several: bool
) -> LayerGraph:
    """What is planned, in the mode that is asked for."""
    if not isinstance(model, LayerGraph):
        vary = inference or several
        return capture(model, *inputs, training=not inference, sizes_vary=vary)
    if inference and model.training:
        raise PlanError("the graph is of training: capture(..., training=False) is for inference")
    return model


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
        return examine(costs, gradients, chosen=replace(own, recompute=plan.recompute))

    return for_all_sizes(plans, cap, fitted)


@uncollected()
def examine(
    costs: Costs,
    gradients: Engine | str | None = None,
    cap: int | None = None,
    chosen: Plan | None = None,
    recompute: str = "none",
) -> Plan:
    """The best plan, or the given one, with all that is known about it."""
    began = perf_counter()
    planner, steps = Planner(costs), Steps(costs, Engine.of(gradients))
    found = _candidates(planner, cap, recompute) if chosen is None else [chosen]
    # Computing again frees memory at a price: then the least cost without a limit is what holds.
    keeps = recompute == "none" and not any(plan.recompute for plan in found)
    bound, capped = least_cost(planner, cap if keeps else None)
    seconds = perf_counter() - began
    few = costs.world <= SIMULATED
    rivals = {
        name: Rival(rival, prediction, steps.of(rival).seconds if few else 0.0)
        for name, (rival, prediction) in baselines(costs).items()
    }
    if chosen is None and few and recompute != "all":
        found += [rival.plan for rival in rivals.values() if _allowed(rival, costs, cap)]
    best = _fastest(found, steps, few)
    prediction = predict(best, costs)
    num_splits = sum(len(costs.of(layer).configs) for layer in planner.layers)
    numbers = len(planner.layers), num_splits, seconds, len(costs.pins)
    optimality = Optimality(prediction.seconds, bound, *numbers, cap if capped else None)
    known = costs, best, prediction, steps.of(best), steps, optimality, rivals
    return replace(best, findings=Findings(*known, cap, _hidden(planner, prediction), recompute))


def _hidden(planner: Planner, prediction: Prediction) -> float:
    """The part of the updates under which a plan is nearest to the best one."""
    if planner.costs.world > SIMULATED or not planner.costs.training.gradients:
        return HIDDEN[0]

    def regret(hidden: float) -> float:
        return prediction.seconds - hidden * prediction.update - planner.solution(hidden).bound

    return min(HIDDEN, key=regret)


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
            tried = (all_again(plan, costs) for plan in (*plans, least))
            lightest = min(predict(plan, costs).memory for plan in tried)
            raise PlanError(
                f"the model does not fit: a worker may use {size(cap)}, and the least that plans "
                f"found for {costs.world} workers need, computing again, is {size(lightest)}"
            ) from None
    return fitting


def _allowed(rival: Rival, costs: Costs, cap: int | None) -> bool:
    fits = cap is None or rival.prediction.memory <= cap
    return fits and costs.keeps_pins(rival.plan.layers)


def _fastest(plans: list[Plan], steps: Steps, simulated: bool) -> Plan:
    """The plan of the shortest step; of the least cost, where steps are not simulated."""
    if simulated:
        return min(plans, key=lambda plan: steps.of(plan).seconds)
    return min(plans, key=lambda plan: predict(plan, steps.costs).seconds)
