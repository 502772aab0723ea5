"""How far a plan is at most from the cheapest: a cost that no plan undercuts.

Without a limit on memory the search is exact, so the bound is the least cost itself. Under one, the
bound is the Lagrangian dual: memory gets a price, the search finds the least of cost and price
together, and what the price of the allowed memory is comes off; no plan that fits costs less,
whatever the price, and the best price is looked for. Only rank 0 counts, which has at most what the
fullest rank has: what it holds all the time, beside the largest of what layers work on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.errors import PlanError
from shardwise.planner.best_plan import Planner, predict, size
from shardwise.planner.costs import ROUNDING
from shardwise.planner.memory import SLACK
from shardwise.planner.search import Problem, solve

PRICES = 16  # that are tried, at most
CLOSE = 1e-9  # a share of the cost that does not count


@dataclass(frozen=True)
class Optimality:
    """A plan's cost, and the least that any plan of the splits that were tried can cost.

    >>> print(Optimality(0.202, 0.2, 324, 40176, 1.9))
    proven: no plan of the 40,176 splits tried for 324 layers costs less than 200 ms, this one \
costs 202 ms, 1.00 % more; searched in 1.90 s
    """

    cost_seconds: float
    bound_seconds: float
    num_layers: int
    num_splits: int
    search_seconds: float  # all costs of all splits, and the search
    num_pinned: int = 0  # of the layers
    cap: int | None = None  # bytes of a worker, where the least cost of all does not fit into them

    @property
    def gap(self) -> float:
        """The share by which the cost exceeds the bound at most; below 0 beyond the candidates."""
        if self.bound_seconds <= 0:
            return 0.0 if self.cost_seconds <= 0 else float("inf")
        return self.cost_seconds / self.bound_seconds - 1.0

    def __str__(self) -> str:
        within = f" within {size(self.cap)}" if self.cap is not None else ""
        least = f"{1e3 * self.bound_seconds:.4g} ms"
        pinned = f" ({self.num_pinned} of them pinned)" if self.num_pinned else ""
        tried = f"{self.num_splits:,} splits tried for {self.num_layers} layers{pinned}"
        if abs(self.gap) <= CLOSE:
            claim = f"costs less than this one, {least}"
        else:
            here = f"{1e3 * self.cost_seconds:.4g} ms, {100 * abs(self.gap):.2f} %"
            claim = f"costs less than {least}, this one costs {here} "
            claim += "more" if self.gap > 0 else "less with splits that were not tried"
        return (
            f"proven: no plan of the {tried}{within} {claim}; "
            f"searched in {self.search_seconds:.2f} s"
        )


def least_cost(planner: Planner, cap: int | None) -> tuple[float, bool]:
    """Seconds that no plan of the candidates undercuts, and whether the cap has a part in that."""
    free = planner.solution()
    if cap is None or predict(planner.best(), planner.costs).memory <= cap:
        return free.bound, False
    try:
        return _Dual(planner, (cap + 1) / SLACK).maximum(planner.high_price), True
    except PlanError:  # none of the candidates fits; a plan of other splits may
        return free.bound, True


@dataclass(frozen=True)
class _Line:
    """The bound at one price of memory, and how it changes with the price."""

    price: float
    value: float
    slope: float

    def meets(self, other: _Line) -> float:
        """The price at which both lines have the same value."""
        constants = [line.value - line.slope * line.price for line in (self, other)]
        return (constants[1] - constants[0]) / (self.slope - other.slope)

    def at(self, price: float) -> float:
        return self.value + self.slope * (price - self.price)


class _Dual:
    """The bound as a function of the price of memory: concave, made of straight pieces."""

    def __init__(self, planner: Planner, room: float) -> None:
        each = [planner.costs.of(layer) for layer in planner.layers]
        self.first, problem = [costs.first for costs in each], planner.problem()
        left = room - sum(float(first.min()) for first in self.first)  # for what is worked on
        nodes = [
            np.where(costs.at_work <= left * ROUNDING, node, np.inf)
            for costs, node in zip(each, problem.costs, strict=True)
        ]
        self.problem = Problem(nodes, problem.edges)
        self.room = room - max(float(costs.at_work.min()) for costs in each)

    def line(self, price: float) -> _Line:
        pairs = zip(self.problem.costs, self.first, strict=True)
        nodes = [cost + price * first for cost, first in pairs]
        found = solve(Problem(nodes, self.problem.edges))
        held = sum(float(f[c]) for f, c in zip(self.first, found.choices, strict=True))
        return _Line(price, found.bound - price * self.room, held - self.room)

    def maximum(self, high_price: float) -> float:
        """The greatest bound found: where the lines of two prices meet lies the next one."""
        low, high = self.line(0.0), self.line(high_price)
        best = max(low.value, high.value)
        for _ in range(PRICES):
            if low.slope <= 0 or high.slope >= 0:
                break
            price = low.meets(high)
            found = self.line(price)
            best = max(best, found.value)
            if found.value >= low.at(price) - CLOSE * abs(best):
                break
            low, high = (found, high) if found.slope > 0 else (low, found)
        return best
