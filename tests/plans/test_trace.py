"""Traces of real steps, and what is learned from them."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from pool import shared_pool
from shardwise import Plan, capture, parallelize
from shardwise.cluster.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.measure.cluster_file import Overheads, Step, calibrated, calibration_plans
from shardwise.planner.layer_costs import Roofline, Training
from shardwise.planner.simulate import simulate
from shardwise.plans.trace import Trace


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


GRAPH = capture(net(), torch.zeros(4, 3, 8, 8))


def step(plan: Plan) -> Trace:
    model = parallelize(seeded(net()), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = seeded_input((4, 3, 8, 8))
    model(x).sum().backward()
    with model.record() as trace:
        model(x).sum().backward()
        optimizer.step()
    before = len(trace.spans)
    model(x)  # what happens later is not noted
    assert len(trace.spans) == before
    return trace


@pytest.mark.parametrize("split", [{"n": 2}, {"h": 2}, {"f": 2}])
def test_a_recorded_step_has_what_a_simulated_one_has(split: dict[str, int]) -> None:
    plan = Plan.uniform(GRAPH, **split)
    first, second = shared_pool(2).run(step, plan)
    assert first.world == 2 and first.seconds > 0
    assert [s.name for s in first.spans] == [s.name for s in second.spans]
    predicted = simulate(plan, GRAPH, Cluster.load("local").with_workers(2))

    def communications(trace: Trace) -> set[tuple[str, str]]:
        kinds = [s for s in trace.spans if s.blocked is not None and s.seconds.any()]
        return {(s.name, s.kind) for s in kinds if s.kind not in ("gradients", "agreement")}

    assert communications(first) == communications(predicted)
    for kind in ("forward", "backward"):
        names = {s.name for s in predicted.spans if s.kind == kind and s.seconds.any()}
        assert names <= {s.name for s in first.spans if s.kind == kind}
    assert {"update"} <= {s.kind for s in first.spans}
    assert 0.0 <= first.overlap <= 1.0
    assert (first.busy <= first.seconds).all()
    assert all((s.ends >= s.starts).all() for s in first.spans)


def test_overheads_are_found_from_steps() -> None:
    """Steps that were simulated with known overheads give these overheads back."""
    cluster = Cluster.load("local").with_workers(2)
    link = cluster.links[0].model_copy(
        update={"sum_bandwidth": 1e9, "sum_latency": 1e-3, "latency": 1e-3, "post": 2e-4}
    )
    cluster = cluster.model_copy(update={"links": (link, *cluster.links[1:])})
    truth = Overheads(message=3e-3, sum=2e-3, post=5e-4)
    timer, training = Roofline(cluster.device), Training()
    steps = [
        Step(plan, GRAPH, timer, training, simulate(plan, GRAPH, truth.on(cluster), timer).seconds)
        for plan in calibration_plans(GRAPH, 2)
    ]
    found = calibrated(cluster, steps)
    for made in steps:
        again = simulate(made.plan, GRAPH, found, timer, training).seconds
        assert again == pytest.approx(made.seconds, rel=0.05)
    assert np.array(astuple(Overheads.of(found))) == pytest.approx(
        np.array(astuple(truth)), rel=0.5
    )


def test_a_plan_for_more_workers_than_the_cluster_has_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan is for 2 workers, and the cluster has 4"):
        simulate(Plan.uniform(GRAPH, n=2), GRAPH, Cluster.load("local").with_workers(4))
