"""A plan for inputs of several sizes: one for each, which share the blocks of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwise.planner.best_plan import predict
from shardwise.planner.costs import Costs
from shardwise.planner.memory import SLACK
from shardwise.plans.plan import Plan
from shardwise.plans.program import param_layouts


def for_all_sizes(
    plans: Sequence[Plan], cap: int | None, fitted: Callable[[Plan, Costs], Plan]
) -> Plan:
    """The first plan, with those of other sizes; each has its findings.

    What two of them split in different ways is kept whole, see `param_layouts`. Where a worker has
    no room for that, the first plan rules for the other size as well.
    """
    first, *others = plans
    kept: list[Plan] = []
    for other in others:
        together = replace(first, others=(*kept, other))
        if cap is None or _most_held(together) <= cap:
            kept.append(other)
        else:
            kept.append(fitted(first, other.findings.costs))
    return replace(first, others=tuple(kept))


def _most_held(plan: Plan) -> float:
    """The most that any worker holds at any of the sizes."""
    sizes = [replace(plan, others=()), *plan.others]
    known = [each.findings.costs for each in sizes]
    graphs = [costs.graph for costs in known]
    itemsize = known[0].training.itemsize

    def stored(layouts: dict) -> float:
        return sum(float(layout.numels.max()) for layout in layouts.values()) * itemsize

    shared = stored(param_layouts(plan, *graphs))
    return max(
        predict(each, costs).memory + SLACK * (shared - stored(param_layouts(each, costs.graph)))
        for each, costs in zip(sizes, known, strict=True)
    )
