"""What the command line asks of the planner and the simulator, and how it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.planner.best_plan import Planner
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.layer_times import timer_for
from shardwise.planner.planned import examine
from shardwise.planner.simulate import simulate
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.specs.model_spec import ModelSpec
from shardwise.specs.plan_spec import PlanSpec, parse_engine
from shardwise.units import parse_size

PER_WORKER = 32  # samples, where no batch is given
OUTPUTS = ("full", "local")


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, and what to find out about them."""

    spec: ModelSpec
    cluster: str = "local"
    workers: int | None = None
    gradients: str = "buckets:8MiB"
    output: str = "full"
    plan: PlanSpec = field(default_factory=PlanSpec)

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ShardwiseError(f"output {self.output!r} must be {' or '.join(OUTPUTS)}")

    def costs(self) -> Costs:
        machines = Cluster.load(self.cluster)
        if self.workers is not None or machines.world == 1:
            machines = machines.with_workers(2 if self.workers is None else self.workers)
        graph = self.spec.graph(PER_WORKER * machines.world)
        return Costs(graph, machines, timer_for(machines, graph), Training(output=self.output))


def best_plan(costs: Costs, gradients: str, memory: str | None) -> Plan:
    """The best plan within the memory of a worker, with all that is known about it."""
    cap = costs.cluster.device.memory if memory is None else parse_size(memory)
    return examine(costs, parse_engine(gradients), cap=cap)


def simulated(request: PlanRequest) -> Trace:
    """One step under the plan that is asked for."""
    costs, engine = request.costs(), parse_engine(request.gradients)
    chosen = _chosen(request, costs)
    return simulate(chosen, costs.graph, costs.cluster, costs.timer, costs.training, engine)


def examined(request: PlanRequest, chosen: Plan | None = None) -> Plan:
    """A given plan, or the one that is asked for, with all that is known about it."""
    costs, engine = request.costs(), parse_engine(request.gradients)
    if chosen is None:
        chosen = _chosen(request, costs)
    else:
        chosen.check(costs.graph)
    return examine(costs, engine, chosen=chosen)


def _chosen(request: PlanRequest, costs: Costs) -> Plan:
    return request.plan.find(costs.graph, costs.world, Planner(costs).best)


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
