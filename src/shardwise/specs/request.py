"""What the command line asks of the planner and the simulator, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.planner.best_plan import Planner
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.layer_times import timer_for
from shardwise.planner.pins import Pins, pinned
from shardwise.planner.planned import best_plan, examine, of_sizes
from shardwise.planner.simulate import simulate
from shardwise.plans.plan import Plan
from shardwise.plans.program import OUTPUTS
from shardwise.plans.trace import Trace
from shardwise.specs.model_spec import ModelSpec, Shapes
from shardwise.specs.plan_spec import PlanSpec
from shardwise.units import parse_size

PER_WORKER = 32  # samples, where no batch is given


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, and what to find out about them."""

    spec: ModelSpec
    cluster: str = "local"
    workers: int | None = None
    gradients: str = "buckets:8MiB"
    output: str = "full"
    plan: PlanSpec = field(default_factory=PlanSpec)
    inference: bool = False
    sizes: tuple[Shapes, ...] = ()  # of other inputs to plan for
    pins: Pins = field(default_factory=dict)  # layers with a split that is fixed

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ShardwiseError(f"output {self.output!r} must be one of {', '.join(OUTPUTS)}")

    def costs(self) -> Costs:
        """What is asked for, for inputs of the first size."""
        return self.all_costs()[0]

    def all_costs(self) -> list[Costs]:
        """The same for inputs of every size."""
        machines = Cluster.load(self.cluster)
        if self.workers is not None or machines.world == 1:
            machines = machines.with_workers(2 if self.workers is None else self.workers)
        samples = 1 if self.inference else PER_WORKER * machines.world
        graph = self.spec.graph(samples, not self.inference, self.inference or bool(self.sizes))
        training = Training.none(self.output) if self.inference else Training(output=self.output)
        return [
            pinned(Costs(each, machines, timer_for(machines, each), training), self.pins)
            for each in of_sizes(graph, self.sizes)
        ]


def planned(
    each: Sequence[Costs], gradients: str, memory: str | None, recompute: str = "none"
) -> Plan:
    """The best plan within the memory of a worker, with all that is known about it."""
    cap = each[0].cluster.device.memory if memory is None else parse_size(memory)
    return best_plan(each, gradients, cap, recompute)


def simulated(request: PlanRequest) -> Trace:
    """One step under the plan that is asked for."""
    costs = request.costs()
    chosen, gradients = _chosen(request, costs), request.gradients
    return simulate(chosen, costs.graph, costs.cluster, costs.timer, costs.training, gradients)


def examined(request: PlanRequest, chosen: Plan | None = None) -> Plan:
    """A given plan, or the one that is asked for, with all that is known about it."""
    costs = request.costs()
    if chosen is None:
        chosen = _chosen(request, costs)
    else:
        chosen.check(costs.graph)
    return examine(costs, request.gradients, chosen=chosen)


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
