"""Why a layer does not have another split: what that would cost, all other layers solved anew."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError
from shardwise.geometry.grid import Config
from shardwise.planner.best_plan import Planner, predict, size
from shardwise.planner.costs import usual
from shardwise.planner.pins import meant, planned_layer
from shardwise.planner.plan_difference import PlanDifference, share, signed
from shardwise.planner.recompute import all_again, fitted
from shardwise.plans.plan import Plan

if TYPE_CHECKING:
    from shardwise.planner.planned import Findings


@dataclass(frozen=True)
class WhyNot:
    """One sentence about a split of a layer, and what it changes where it is possible."""

    layer: str
    split: str
    sentence: str
    difference: PlanDifference | None = None
    plan: Plan | None = field(default=None, repr=False)  # the best with this split

    @property
    def is_possible(self) -> bool:
        return self.plan is not None

    def data(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        difference = None if self.difference is None else self.difference.data()
        shown = {"layer": self.layer, "split": self.split, "sentence": self.sentence}
        return {**shown, "possible": self.is_possible, "difference": difference}

    def __str__(self) -> str:
        if self.difference is None:
            return self.sentence
        return f"{self.sentence}\n\n{self.difference}"


def why_not(findings: Findings, name: str, split: str | Config) -> WhyNot:
    """What the best plan costs in which this layer has this split."""
    layer, graph = planned_layer(findings.costs.graph, name, "to ask about"), findings.costs.graph
    asked = name, str(split)
    try:
        configs = meant(findings.costs, name, split)
    except PlanError as error:
        return WhyNot(*asked, f"{error}")
    chosen = usual(layer, findings.plan.config(layer, graph))
    if chosen in configs:
        return WhyNot(*asked, f"{name} has this split: {chosen}", plan=findings.plan)
    forced, least = _forced(findings, name, configs)
    if forced is None:
        limit = size(findings.cap or 0)
        return WhyNot(
            *asked,
            f"with {configs[0]} of {name} a worker needs at least {size(least)} as far as plans "
            f"were found, and may use {limit}",
        )
    difference = PlanDifference.between(findings, forced)
    tried = findings.costs.candidates.configs(layer, graph.batch)
    words = [_sentence(name, chosen, usual(layer, forced.plan.config(layer, graph)), difference)]
    words += [] if set(configs) <= set(tried) else [_untried(findings.costs.world)]
    plan = replace(forced.plan, findings=forced)
    return WhyNot(*asked, "; ".join(words), difference, plan)


def _forced(
    findings: Findings, name: str, configs: tuple[Config, ...]
) -> tuple[Findings | None, int]:
    """The best plan with this split, looked for as the plan itself was; or the least memory."""
    costs, cap = findings.costs.pinned({name: configs}), findings.cap
    planner = Planner(costs)
    plan = planner.best(findings.hidden)
    choice = findings.recompute if costs.training.gradients else "none"
    if choice == "all":
        plan = all_again(plan, costs)
    if cap is not None and predict(plan, costs).memory > cap:
        plain = replace(plan, recompute=())
        lighter = None if choice == "none" else fitted(plain, costs, cap)
        if lighter is None:
            least = planner.least_memory()[1].memory
            if least > cap:
                return None, least
            lighter = planner.under(cap)[0]
        plan = lighter
    prediction, step = predict(plan, costs), findings.steps.of(plan)
    optimality = replace(findings.optimality, cost_seconds=prediction.seconds)
    known = {"prediction": prediction, "trace": step, "optimality": optimality}
    return replace(findings, costs=costs, plan=plan, **known), prediction.memory


def _sentence(name: str, before: Config, after: Config, difference: PlanDifference) -> str:
    costs, steps = (
        [getattr(plan, what) for plan in (difference.before, difference.after)]
        for what in ("cost", "step")
    )
    num_others = sum(layer != name for layer in difference.changed)
    follow = f"{num_others or 'no'} other layer{'' if num_others == 1 else 's'}"
    return (
        f"{after} of {name} instead of {before}: cost {signed(costs[1] - costs[0])} ms "
        f"({share(*costs)}: {difference.kinds()}), simulated step {signed(steps[1] - steps[0])} ms "
        f"({share(*steps)}), {follow} with another split"
    )


def _untried(world: int) -> str:
    return (
        f"it is no candidate of the search, which tries products of factors of {world} "
        "on the first ranks or evenly spread ones"
    )
