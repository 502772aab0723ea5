"""The latency that messages have amid computation, from steps that were really run.

On an idle machine a message takes less: in a step, the threads that move it wait for a core, and
ranks wait for the slowest of them. So a few steps are run, and simulated with latencies that make
both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cost import Timer, Training
from shardwise.graph import LayerGraph
from shardwise.plan import Plan
from shardwise.simulate import simulate

LEAST = 1e-6  # seconds
UNIT = 1e-3
SEEDS = (11, 12)


@dataclass(frozen=True)
class Step:
    """One training step that was run, and what it takes to simulate it."""

    plan: Plan
    graph: LayerGraph
    timer: Timer
    training: Training
    seconds: float


def calibrated(cluster: Cluster, steps: Sequence[Step]) -> Cluster:
    """The cluster with latencies of messages and of sums that explain these steps best."""
    rows, missing = [], []
    for step in steps:
        none, messages, sums = (
            simulate(step.plan, step.graph, changed, step.timer, step.training).seconds
            for changed in (
                with_latencies(cluster, 0.0, 0.0),
                with_latencies(cluster, UNIT, 0.0),
                with_latencies(cluster, 0.0, UNIT),
            )
        )
        # Relative to the step, so that short steps count as much as long ones.
        rows.append([(messages - none) / UNIT / step.seconds, (sums - none) / UNIT / step.seconds])
        missing.append((step.seconds - none) / step.seconds)
    return with_latencies(cluster, *_fitted(np.array(rows), np.array(missing)))


def _fitted(rows: np.ndarray, missing: np.ndarray) -> tuple[float, float]:
    """The two latencies, neither of them negative; one alone where the other would be."""
    best, least = (LEAST, LEAST), float(np.sum(missing**2))
    for columns in ([0, 1], [0], [1]):
        found, *_ = np.linalg.lstsq(rows[:, columns], missing, rcond=None)
        error = float(np.sum((rows[:, columns] @ found - missing) ** 2))
        if (found >= 0).all() and error < least:
            both = np.full(2, LEAST)
            both[columns] = np.maximum(found, LEAST)
            best, least = (float(both[0]), float(both[1])), error
    return best


def with_latencies(cluster: Cluster, messages: float, sums: float) -> Cluster:
    """The same cluster with other latencies of its nearest links."""
    link, *others = cluster.links
    changed = {"latency": messages} | ({"sum_latency": sums} if link.sum_bandwidth else {})
    return cluster.model_copy(update={"links": (link.model_copy(update=changed), *others)})


def calibration_plans(graph: LayerGraph, world: int) -> list[Plan]:
    """Plans that show both: many messages of all kinds, and sums of statistics and gradients."""
    samples, rows = (Plan.uniform(graph, world, **{axis: world}) for axis in ("n", "h"))
    early = {layer.name for layer in graph.layers[: len(graph.layers) // 2]}
    halves = Plan.make(
        graph, world, lambda la: (rows if la.name in early else samples).config(la, graph)
    )
    return [*(Plan.random(graph, world, seed) for seed in SEEDS), halves]
