"""What the backward pass computes again: what it frees, what it takes, and what to choose.

Layers are taken in *units*, each a product with a weight and what follows it. Segments are so many
units in a row: short ones take little memory while they are there again, long ones keep less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import PlanError
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.best_plan import predict
from shardwise.planner.costs import Costs
from shardwise.planner.memory import SegmentMemory
from shardwise.plans.compile import compile_program
from shardwise.plans.plan import Plan
from shardwise.plans.program import Run
from shardwise.plans.segments import Segments

CHOICES = ("none", "auto", "all")
LENGTHS = (1, 2, 3, 4, 6)  # of segments, in units, that are tried


def check_choice(recompute: str) -> None:
    if recompute not in CHOICES:
        raise PlanError(f"recompute={recompute!r} must be one of {', '.join(CHOICES)}")


@dataclass(frozen=True)
class Offer:
    """A segment that may be computed again."""

    layers: tuple[str, ...]
    seconds: float
    freed: float  # bytes

    @property
    def price(self) -> float:
        return self.seconds / self.freed


def all_again(plan: Plan, costs: Costs) -> Plan:
    """The plan with everything computed again that frees memory, as it needs least."""
    found = [replace(plan, recompute=_chosen(offers)) for offers in _offers(plan, costs)]
    return min(found, key=lambda each: predict(each, costs).memory)


def fitted(plan: Plan, costs: Costs, cap: int) -> Plan | None:
    """The plan with as little computed again as fits into so many bytes, cheapest bytes first."""
    if predict(plan, costs).memory <= cap:
        return plan
    found = [_under(plan, costs, cap, offers) for offers in _offers(plan, costs)]
    fitting = [each for each in found if each is not None]
    return min(fitting, key=lambda each: predict(each, costs).seconds, default=None)


def _under(plan: Plan, costs: Costs, cap: int, offers: Sequence[Offer]) -> Plan | None:
    """The plan with the first of these offers that make it fit, if any do."""

    def with_first(count: int) -> Plan:
        return replace(plan, recompute=_chosen(offers[:count]))

    low, high = 0, len(offers)  # what does not fit, and what may
    if predict(with_first(high), costs).memory > cap:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        fits = predict(with_first(middle), costs).memory <= cap
        low, high = (low, middle) if fits else (middle, high)
    return with_first(high)


def _chosen(offers: Sequence[Offer]) -> Segments:
    return tuple(offer.layers for offer in offers)


def _offers(plan: Plan, costs: Costs) -> list[list[Offer]]:
    """For every length of segments, those that free memory, the cheapest bytes first.

    The last is none of them: its gradients are wanted at once, while all of it is still there.
    """
    units = _units(plan, costs)
    found = []
    for length in LENGTHS:
        groups = [units[start : start + length] for start in range(0, len(units), length)]
        segments = tuple(tuple(name for unit in group for name in unit) for group in groups)
        whole = replace(plan, recompute=segments)
        kept = SegmentMemory.of(whole, costs.memory)
        offers = [
            Offer(each.layers, _seconds(each.layers, plan, costs), float(each.freed.max()))
            for each in kept[:-1]
        ]
        offers = [offer for offer in offers if offer.freed > 0]
        found.append(sorted(offers, key=lambda offer: offer.price))
    return found


def _units(plan: Plan, costs: Costs) -> list[list[str]]:
    """Layers in a row, each row from a product with a weight to the next."""
    graph = costs.graph
    program = compile_program(graph, replace(plan, recompute=()), 0, graph.params)
    units: list[list[str]] = []
    for step in program.forward:
        if isinstance(step, Run) and id(step) in program.recorded:
            for op in step.ops:
                if not units or STRATEGIES[op.local.layer.op].contracts:
                    units.append([])
                units[-1].append(op.local.layer.name)
    return units


def _seconds(layers: Sequence[str], plan: Plan, costs: Costs) -> float:
    """How long computing these layers takes, on the slowest rank."""
    configs, found = plan.configs(costs.graph), np.zeros(plan.world)
    for name in layers:
        split = Split.of(costs.graph[name], configs[name], plan.world)
        found = found + costs.timer.seconds(split)[0]
    return float(found.max())
