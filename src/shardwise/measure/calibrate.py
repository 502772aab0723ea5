"""What messages cost amid computation, from steps that were really run.

On an idle machine a message takes less: in a step, the threads that move it wait for a core, and
ranks wait for the slowest of them. So a few steps are run, and the overheads of the simulation are
those that make both agree best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.graph.layer_graph import LayerGraph
from shardwise.planner.layer_costs import Timer, Training
from shardwise.planner.simulate import simulate
from shardwise.plans.plan import Plan

LEAST, TINY = 0.1, 1e-7  # a factor, and seconds
SEED = 11
TRUST = 0.02  # an overhead that is twice the probed one weighs as much as an error of 2 %


@dataclass(frozen=True)
class Step:
    """One training step that was run, and what it takes to simulate it."""

    plan: Plan
    graph: LayerGraph
    timer: Timer
    training: Training
    seconds: float


@dataclass(frozen=True)
class Overheads:
    """What communication costs amid computation; steps take longer in proportion to each."""

    message: float  # seconds, as the others; see Link
    sum: float
    post: float

    @classmethod
    def of(cls, cluster: Cluster) -> Overheads:
        link = cluster.links[0]
        return cls(link.latency, link.sum_latency or link.latency, link.post)

    def on(self, cluster: Cluster) -> Cluster:
        """The same cluster with these overheads."""
        link, *others = cluster.links
        changed = {"latency": self.message, "post": self.post}
        changed |= {"sum_latency": self.sum} if link.sum_bandwidth else {}
        return cluster.model_copy(update={"links": (link.model_copy(update=changed), *others)})


def calibrated(cluster: Cluster, steps: Sequence[Step]) -> Cluster:
    """The cluster with the overheads that explain these steps best."""
    probed = tuple(max(seconds, TINY) for seconds in astuple(Overheads.of(cluster)))
    rows, missing = [], []
    for step in steps:
        base, *raised = (
            simulate(step.plan, step.graph, changed, step.timer, step.training).seconds
            for changed in (Overheads(*values).on(cluster) for values in _each_doubled(probed))
        )
        # In parts of the step, so that short steps count as much as long ones.
        rows.append([(seconds - base) / step.seconds for seconds in raised])
        missing.append((step.seconds - base) / step.seconds)
    factors = 1.0 + _fitted(np.array(rows), np.array(missing))
    found = np.maximum(factors, LEAST) * probed
    return Overheads(*map(float, found)).on(cluster)


def _each_doubled(values: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """The values, and the values with the first, the second, ... twice as large."""
    yield values
    for place in range(len(values)):
        yield (*values[:place], 2.0 * values[place], *values[place + 1 :])


def _fitted(rows: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """How much larger each overhead is; those that the steps hardly show stay as probed."""
    trust = TRUST * np.sqrt(len(rows)) * np.eye(rows.shape[1])
    rows = np.concatenate([rows, trust])
    missing = np.concatenate([missing, np.zeros(len(trust))])
    return np.linalg.lstsq(rows, missing, rcond=None)[0]


def calibration_plans(graph: LayerGraph, world: int) -> list[Plan]:
    """Plans that show both: many messages of all kinds, and sums of statistics and gradients."""
    early = {layer.name for layer in graph.layers[: len(graph.layers) // 2]}

    def halves(first: str, second: str) -> Plan:
        """One split for the first half of the layers, another for the rest."""
        a, b = (Plan.uniform(graph, world, **{axis: world}) for axis in (first, second))
        return Plan.make(graph, world, lambda la: (a if la.name in early else b).config(la, graph))

    return [Plan.random(graph, world, SEED), halves("h", "n"), halves("c", "f")]
