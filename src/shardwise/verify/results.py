"""What came of comparing plans with one device, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.plans.plan import Plan
from shardwise.verify.comparison import FACTOR, Comparison

KINDS = ("output", "loss", "gradient", "statistics", "weight")
COVERED = {
    True: "covered: training in this dtype with SGD, a forward pass, its gradients and the weights "
    "after the last step; not covered: evaluation (--eval), other optimizers, hooks, other batches",
    False: "covered: outputs of one forward pass in evaluation; not covered: training, other "
    "sizes of inputs",
}
MOST_NAMED = 3  # tensors that differ


@dataclass(frozen=True)
class PlanResult:
    """What came of one plan."""

    label: str
    plan: Plan
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    @property
    def error(self) -> float:
        """The largest relative error of all tensors."""
        return max((c.error for c in self.comparisons), default=0.0)

    def by_kind(self) -> dict[str, list[Comparison]]:
        """The tensors of each kind that the model has."""
        groups = {kind: [c for c in self.comparisons if c.kind == kind] for kind in KINDS}
        return {kind: group for kind, group in groups.items() if group}


def summary(results: Sequence[PlanResult]) -> list[str]:
    """A few sentences about all plans; the last one has the verdict."""
    comparisons = [c for result in results for c in result.comparisons]
    plans = f"{_count(len(results), 'plan')} on {_count(results[0].plan.world, 'worker')}"
    failed = sum(not result.passed for result in results)
    verdict = f"{_count(failed, 'plan')} FAILED" if failed else "equal to one device"
    tensors = f"{_count(len(comparisons), 'tensor')} compared"
    return [
        COVERED[any(c.kind != "output" for c in comparisons)],
        *_about_failures(comparisons),
        *_about_noise(comparisons),
        f"{plans}, {tensors}: {verdict} ({_worst(comparisons)})",
    ]


def _about_failures(comparisons: Sequence[Comparison]) -> list[str]:
    """The worst tensors by name, with what is wrong where that is not a matter of numbers."""
    failed = sorted((c for c in comparisons if not c.passed), key=lambda c: -c.severity)
    names = [c.label + (f" ({c.fault})" if c.fault else "") for c in failed]
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    causes = dict.fromkeys(c.cause for c in failed if c.cause)
    lines = [f"different: {', '.join(names[:MOST_NAMED])}{more}"] if names else []
    return [*lines, *(f"likely cause: {cause}" for cause in causes)]


def _about_noise(comparisons: Sequence[Comparison]) -> list[str]:
    if all(c.noise is None for c in comparisons):
        return []
    excused = [c for c in comparisons if c.limit > c.tolerance]
    places = sorted({c.origin for c in excused if c.origin})
    arises = f"; it arises {' and '.join(places)}" if places else ""
    limits = f"; limits are {FACTOR:.0f} times the noise" if excused else ""
    lines = [
        "noise: what one device makes of a change in the last bit of its inputs and weights"
        f"{arises}{limits}"
    ]
    if count := sum(c.undetermined for c in excused):
        lines.append(
            f"open: {_count(count, 'tensor')} of which one device itself keeps no digit, so that "
            "nothing is proved; more samples (--batch) or larger inputs may help"
        )
    return lines


def worst_of(comparisons: Sequence[Comparison]) -> Comparison:
    return max(comparisons, key=lambda c: (c.severity, c.error))


def _worst(comparisons: Sequence[Comparison]) -> str:
    worst = worst_of(comparisons)
    known = f"relative error {worst.error:.1e}, limit {limit_of(worst)}"
    if any(c.noise is not None for c in comparisons):
        return f"worst: {worst.label}, {known}"
    return f"largest {known}"


def limit_of(comparison: Comparison) -> str:
    """How large the error may be, in words where it is not a number."""
    if comparison.undetermined:
        return "none"
    return f"{comparison.limit:.0e}" if comparison.limit else "exact"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
