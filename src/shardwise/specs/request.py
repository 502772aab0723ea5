"""What the command line asks of the planner and the simulator, and how it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.cluster.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import capture
from shardwise.planner.best_plan import Planner
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.layer_times import timer_for
from shardwise.planner.planned import examine
from shardwise.planner.simulate import simulate
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.specs.model_spec import default_shape, load_model
from shardwise.units import parse_size

PER_WORKER = 32  # samples, where no batch is given
OUTPUTS = ("full", "local")


@dataclass(frozen=True)
class Question:
    """A model, a cluster, and what to find out about them."""

    spec: str
    cluster: str = "local"
    workers: int | None = None
    batch: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    memory: str | None = None
    gradients: str = "buckets:8MiB"
    output: str = "full"
    plan: str = "auto"
    split: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def machines(self) -> Cluster:
        cluster = Cluster.load(self.cluster)
        if self.workers is None and cluster.world > 1:
            return cluster
        return cluster.with_workers(2 if self.workers is None else self.workers)

    def graph(self, world: int) -> LayerGraph:
        """The model's layers; its weights are never made."""
        if self.batch is not None and self.batch < 1:
            raise ShardwiseError(f"batch {self.batch}: there must be at least 1 sample")
        shapes = self.shapes
        if not shapes:
            shapes = (default_shape(self.spec, self.batch or PER_WORKER * world),)
        elif self.batch is not None and any(shape[0] != self.batch for shape in shapes):
            raise ShardwiseError(
                f"--batch {self.batch} does not agree with the input of {shapes[0][0]} samples"
            )
        with torch.device("meta"):
            model = load_model(self.spec, **self.options)
        return capture(model, *(torch.empty(shape, device="meta") for shape in shapes))

    def costs(self) -> Costs:
        if self.output not in OUTPUTS:
            raise ShardwiseError(f"output {self.output!r} must be {' or '.join(OUTPUTS)}")
        machines = self.machines()
        training = Training(output=self.output)
        graph = self.graph(machines.world)
        return Costs(graph, machines, timer_for(machines, graph), training)


def answer(question: Question) -> Plan:
    """The best plan, with all that is known about it."""
    costs, cap = question.costs(), question.machines().device.memory
    if question.memory is not None:
        cap = parse_size(question.memory)
    return examine(costs, parse_engine(question.gradients), cap=cap)


def simulated(question: Question) -> Trace:
    """One step under the best plan, or under the one that is asked for."""
    costs, engine = question.costs(), parse_engine(question.gradients)
    return simulate(
        _chosen(question, costs), costs.graph, costs.cluster, costs.timer, costs.training, engine
    )


def examined(question: Question, chosen: Plan | None = None) -> Plan:
    """A given plan, or the one that is asked for, with all that is known about it."""
    costs, engine = question.costs(), parse_engine(question.gradients)
    if chosen is None:
        chosen = _chosen(question, costs)
    else:
        _check(chosen, costs)
    return examine(costs, engine, chosen=chosen)


def _chosen(question: Question, costs: Costs) -> Plan:
    """The plan that a question names."""
    if question.split:
        return Plan.uniform(costs.graph, costs.world, **question.split)
    if question.plan == "auto":
        return Planner(costs).best()
    if question.plan == "owt":
        return Plan.owt(costs.graph, costs.world)
    chosen = Plan.load(question.plan)
    _check(chosen, costs)
    return chosen


def _check(chosen: Plan, costs: Costs) -> None:
    chosen.check(costs.graph)
    if chosen.world != costs.world:
        raise ShardwiseError(
            f"the plan is for {chosen.world} workers, the cluster has {costs.world}"
        )


def parse_engine(text: str) -> Engine:
    """When gradients are summed.

    >>> parse_engine("chunks:9").last
    9
    """
    mode, _, value = text.partition(":")
    if mode in ("end", "layer") and not value:
        return Engine(mode)
    if text == "chunks:auto":
        return Engine(mode, last="auto")
    if mode == "chunks" and value.isascii() and value.isdigit() and int(value) > 0:
        return Engine(mode, last=int(value))
    if mode == "buckets" and value:
        return Engine(mode, bucket=parse_size(value))
    raise ShardwiseError(
        f"gradients {text!r} must be end, layer, chunks:K, chunks:auto or buckets:SIZE, such as "
        "chunks:9 or buckets:25MiB"
    )


def trace_data(trace: Trace) -> dict[str, Any]:
    """A step as plain data, for JSON."""
    return {
        "workers": trace.world,
        "step_seconds": trace.seconds,
        "busy_seconds": trace.busy.tolist(),
        "waiting_seconds": trace.waiting.tolist(),
        "communication_seconds": trace.communication.tolist(),
        "exposed_seconds": trace.exposed.tolist(),
        "overlap": trace.overlap,
    }
