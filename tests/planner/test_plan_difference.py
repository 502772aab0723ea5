"""What two plans of a model cost, by layer and kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import Plan, PlanError, capture, plan, zoo


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(zoo.build("digits"), torch.zeros(64, 1, 8, 8), cluster="4x1Gb")


def test_a_plan_does_not_differ_from_itself(planned: Plan, tmp_path: Path) -> None:
    planned.save(tmp_path / "plan.json")
    for same in (planned, Plan.load(tmp_path / "plan.json")):
        found = planned.diff(same)
        assert not found.layers and found.total == 0 and str(found).startswith("no layer differs")


def test_rivals_differ_by_what_their_predictions_say(planned: Plan) -> None:
    for rival in planned.findings.rivals.values():
        found = planned.diff(rival.plan)
        expected = rival.prediction.seconds - planned.findings.prediction.seconds
        assert found.total == pytest.approx(expected, abs=1e-12)
        assert sum(row.total for row in found.layers) == pytest.approx(expected, abs=1e-9)
        assert found.after.step == rival.step_seconds
        differ = [n for n, c in planned.layers.items() if str(c) != str(rival.plan.layers[n])]
        inputs = planned.findings.costs.graph.inputs
        assert found.changed == [name for name in differ if name not in inputs]


def test_the_other_way_round_is_the_negative(planned: Plan) -> None:
    other = plan(planned.findings.costs.graph, cluster="4x1Gb", pins={"0.0": "h=4"})
    there, back = planned.diff(other), other.diff(planned)
    assert there.total == pytest.approx(-back.total) and there.changed == back.changed
    assert {row.layer: row.transfer for row in there.layers} == pytest.approx(
        {row.layer: -row.transfer for row in back.layers}
    )


def test_only_the_layers_that_change_most_are_shown() -> None:
    with torch.device("meta"):
        graph = capture(zoo.build("resnet34"), torch.empty(32, 3, 64, 64))
    made = plan(graph, cluster="4x10Gb")
    found = made.diff(Plan.uniform(graph, f=4))
    assert len(found.layers) > 60
    text = str(found)
    assert len(text.splitlines()) < 30 and f"{len(found.layers) - 20} more layers" in text


def test_a_plan_of_another_model_or_number_of_workers_is_refused(planned: Plan) -> None:
    graph = planned.findings.costs.graph
    with pytest.raises(PlanError, match="the other plan is for 2 workers, and this one for 4"):
        planned.diff(Plan.uniform(graph, n=2))
    other = capture(nn.Linear(4, 4), torch.zeros(4, 4))
    with pytest.raises(PlanError, match="the plan"):
        planned.diff(Plan.uniform(other, n=4))


def test_a_plan_for_other_workers_is_compared_by_its_own_costs(planned: Plan) -> None:
    fewer = plan(planned.findings.costs.graph, cluster="2x1Gb")
    found = planned.diff(fewer)
    assert found.after.cost == pytest.approx(fewer.findings.prediction.seconds)
