"""The simulated steps of plans, each found out once: several ways lead to the same plan."""

from __future__ import annotations

from collections.abc import Hashable

from shardwise.planner.costs import Costs
from shardwise.planner.simulate import simulate
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace


class Steps:
    """Steps of plans with the same costs and the same times of gradient sums."""

    def __init__(self, costs: Costs, gradients: Engine) -> None:
        self.costs, self.gradients = costs, gradients
        self._known: dict[Hashable, Trace] = costs.traces.setdefault(gradients, {})

    def of(self, plan: Plan) -> Trace:
        if (key := (plan.recompute, *plan.layers.items())) not in self._known:
            costs = self.costs
            self._known[key] = simulate(
                plan, costs.graph, costs.cluster, costs.timer, costs.training, self.gradients
            )
        return self._known[key]
