"""Why a layer has not another split: forced there, with everything else solved anew."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError

import pytest
import torch

from shardwise import Config, Plan, PlanError, ShardwiseError, capture, plan, zoo
from shardwise.planner.best_plan import Planner, predict
from shardwise.planner.planned import examine


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(zoo.build("digits"), torch.zeros(64, 1, 8, 8), cluster="4x1Gb")


def convolution(plan: Plan) -> str:
    return next(layer.name for layer in plan.findings.costs.graph.layers if layer.op == "conv")


def test_a_forced_split_costs_what_the_best_plan_with_it_costs(planned: Plan) -> None:
    costs = planned.findings.costs
    least = examine(costs, chosen=Planner(costs).best())
    for name in ("0.0", "6"):
        own = costs.of(costs.graph[name]).configs
        for config in own[:: max(1, len(own) // 6)]:
            if config == least.layers[name]:
                continue
            answer = least.why_not(name, config)
            forced = answer.plan
            assert forced is not None and answer.difference is not None
            assert forced.layers[name] == config
            assert answer.difference.total >= -1e-12
            alone = next(a for a in least.explain(name) if a.config == config).total
            here = next(a for a in least.explain(name) if a.config == least.layers[name]).total
            assert answer.difference.total <= alone - here + 1e-12  # others may follow


def test_layers_and_kinds_add_up_to_the_totals(planned: Plan) -> None:
    answer = planned.why_not(convolution(planned), "h=4")
    found = answer.difference
    for kind in ("compute", "transfer", "update", "moved"):
        whole = getattr(found.after, kind) - getattr(found.before, kind)
        assert math.isclose(sum(getattr(row, kind) for row in found.layers), whole, abs_tol=1e-9)
    costs = planned.findings.costs
    assert found.before.cost == pytest.approx(predict(planned, costs).seconds)
    assert found.after.cost == pytest.approx(predict(answer.plan, costs).seconds)
    assert found.after.step == answer.plan.findings.trace.seconds
    assert convolution(planned) in found.changed


def test_the_answer_is_frozen_text_and_plain_data(planned: Plan) -> None:
    name = convolution(planned)
    answer = planned.why_not(name, "h=4")
    text = str(answer)
    assert text.startswith(f"h=4 of {name} instead of ") and "simulated step" in text
    assert "what is more" in text and "all" in text
    assert json.loads(json.dumps(answer.data()))["possible"] is True
    with pytest.raises(FrozenInstanceError):
        answer.sentence = ""


def test_a_split_that_the_layer_has_needs_no_answer(planned: Plan) -> None:
    name = convolution(planned)
    answer = planned.why_not(name, planned.layers[name])
    assert f"{name} has this split" in answer.sentence and answer.difference is None


def test_an_illegal_split_is_answered_by_the_rule_it_breaks(planned: Plan) -> None:
    answer = planned.why_not("6", "h=2")
    assert not answer.is_possible and "legal:" in str(answer)
    many = planned.why_not("6", "n=5")
    assert not many.is_possible and "needs 5 workers, and there are 4" in str(many)


def test_a_split_that_the_search_does_not_try_is_priced_and_said_to_be_so(planned: Plan) -> None:
    answer = planned.why_not(convolution(planned), "h=3")
    assert answer.is_possible and "it is no candidate of the search" in answer.sentence
    assert answer.plan.layers[convolution(planned)] == Config(h=3)


def test_a_split_that_breaks_the_memory_limit_is_said_to_do_so() -> None:
    graph = capture(zoo.build("digits"), torch.zeros(64, 1, 8, 8))
    free = plan(graph, cluster="4x1Gb")
    cap = Planner(free.findings.costs).least_memory()[1].memory
    tight = plan(graph, cluster="4x1Gb", memory=cap)
    answer = tight.why_not(convolution(tight), "whole")
    assert not answer.is_possible
    assert "a worker needs at least" in answer.sentence and "may use" in answer.sentence


def test_a_name_or_a_split_that_means_nothing_is_an_error(planned: Plan) -> None:
    with pytest.raises(PlanError, match="no layer '66' to ask about; did you mean '6'"):
        planned.why_not("66", "n=2")
    with pytest.raises(ShardwiseError, match="layer '6': split 'q=2': 'q' is not an axis"):
        planned.why_not("6", "q=2")


def test_a_plan_that_nobody_examined_cannot_answer() -> None:
    made = Plan.uniform(capture(zoo.build("digits"), torch.zeros(8, 1, 8, 8)), n=2)
    for ask in (lambda: made.why_not("6", "n=2"), lambda: made.diff(made)):
        with pytest.raises(PlanError, match=r"only a plan that shardwise\.plan has made"):
            ask()
