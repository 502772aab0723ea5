"""Which plan is meant by a split, by owt, by a file and by auto, and on how many workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise import Plan
from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.specs.model_spec import ModelSpec
from shardwise.specs.plan_spec import PlanSpec


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return ModelSpec("digits", batch=8, options={"width": 4}).graph(8)


def nothing_better() -> Plan:
    raise AssertionError("nobody asked for the best plan")


def test_a_split_owt_a_file_and_the_best_plan_are_told_apart(
    graph: LayerGraph, tmp_path: Path
) -> None:
    by_split, best = Plan.uniform(graph, n=2, h=2), Plan.uniform(graph, f=4)
    by_split.save(tmp_path / "plan.json")
    file = PlanSpec.parse(str(tmp_path / "plan.json"), None)
    assert file.find(graph, 4, nothing_better) == by_split
    assert PlanSpec.parse(None, "n=2,h=2").find(graph, 4, nothing_better) == by_split
    assert PlanSpec("owt").find(graph, 4, nothing_better) == Plan.owt(graph, 4)
    assert PlanSpec().find(graph, 4, lambda: best) == best


def test_a_split_and_a_file_say_how_many_workers_they_take(
    graph: LayerGraph, tmp_path: Path
) -> None:
    Plan.uniform(graph, 4, n=2).save(tmp_path / "plan.json")
    split, file = PlanSpec.parse(None, "n=2,h=2"), PlanSpec(str(tmp_path / "plan.json"))
    assert split.num_workers == file.num_workers == 4
    assert PlanSpec().num_workers is PlanSpec("owt").num_workers is None
    split.check_workers(6)
    with pytest.raises(ShardwiseError, match="split n=2 h=2 needs 4 workers, and there are 3"):
        split.check_workers(3)
    with pytest.raises(PlanError, match=r"plan\.json is for 4 workers, and there are 6"):
        file.find(graph, 6, nothing_better)
