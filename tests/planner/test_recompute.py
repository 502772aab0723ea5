"""What is computed again: chosen for the memory that a worker may use, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise import Plan, PlanError, capture, plan, simulate, zoo
from shardwise.cluster.cluster import Cluster
from shardwise.graph.layer_graph import LayerGraph
from shardwise.planner.best_plan import predict
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.recompute import all_again, fitted

CLUSTER = Cluster.load("4x10Gb")


@pytest.fixture(scope="module")
def costs() -> Costs:
    graph = capture(zoo.build("unet3d", channels=(8, 16)), torch.zeros(1, 1, 16, 16, 16))
    return Costs(graph, CLUSTER, training=Training(output="local"))


@pytest.fixture(scope="module")
def spatial(costs: Costs) -> Plan:
    return Plan.uniform(costs.graph, h=2, w=2)


def test_all_again_takes_less_memory_and_more_time(costs: Costs, spatial: Plan) -> None:
    kept, again = predict(spatial, costs), predict(all_again(spatial, costs), costs)
    assert again.memory < 0.9 * kept.memory
    assert kept.compute < again.compute < 1.34 * kept.compute
    assert (again.moved, again.transfer) == (kept.moved, kept.transfer)


def test_no_more_is_computed_again_than_the_memory_asks_for(costs: Costs, spatial: Plan) -> None:
    most, least = (predict(p, costs).memory for p in (spatial, all_again(spatial, costs)))
    seconds = []
    for cap in (most, (most + least) // 2, least):
        found = fitted(spatial, costs, cap)
        assert found is not None and predict(found, costs).memory <= cap
        seconds.append(predict(found, costs).seconds)
    assert fitted(spatial, costs, most) == spatial
    assert seconds == sorted(seconds) and seconds[0] < seconds[1]
    assert fitted(spatial, costs, least // 2) is None


def test_the_simulated_step_computes_again_and_sends_nothing_again(
    costs: Costs, spatial: Plan
) -> None:
    again = all_again(spatial, costs)
    kept, more = (simulate(p, costs.graph, CLUSTER, None, costs.training) for p in (spatial, again))
    names = [span.name for span in more.spans if span.kind == "recompute"]
    assert set(names) == {layer for segment in again.recompute for layer in segment}
    assert len(names) == len(set(names))
    messages = [[s.name for s in t.spans if s.lane == "transfers"] for t in (kept, more)]
    assert messages[0] == messages[1]
    spent = more.busy - kept.busy
    assert (spent > 0).all() and (spent < 0.34 * kept.busy).all()


def graph_of_volumes() -> LayerGraph:
    return capture(zoo.build("unet3d", channels=(8, 16)), torch.zeros(1, 1, 16, 16, 16))


def test_plan_computes_again_only_where_the_memory_asks_for_it() -> None:
    graph, training = graph_of_volumes(), Training(output="local")

    def planned(memory: int | None, recompute: str) -> Plan:
        how = {"memory": memory, "training": training, "recompute": recompute}
        return plan(graph, cluster=CLUSTER, **how)  # type: ignore[arg-type]

    free = planned(None, "auto")
    assert not free.recompute and free.layers == planned(None, "none").layers
    everything = planned(None, "all")
    need, least = (p.findings.prediction.memory for p in (free, everything))
    assert everything.recompute and least < need
    under = planned((need + least) // 2, "auto")
    assert under.findings.prediction.memory <= (need + least) // 2
    with pytest.raises(PlanError, match="does not fit"):
        planned(1000, "auto")
    with pytest.raises(PlanError, match="recompute='some' must be one of none, auto, all"):
        planned(None, "some")


def test_a_plan_file_keeps_segments_and_old_files_have_none(spatial: Plan) -> None:
    again = replace(spatial, recompute=(("down.0",), ("up.0.cat", "up.0.convs.0")))
    assert Plan.from_json(again.to_json()) == again
    assert '"recompute": [["down.0"], ["up.0.cat", "up.0.convs.0"]]' in again.to_json()
    assert "recompute" not in spatial.to_json()
    sizes = replace(spatial, others=(replace(again, inputs=((1, 1, 24, 24, 24),)),))
    assert Plan.from_json(sizes.to_json()) == sizes


def test_segments_that_make_no_sense_are_refused() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(2, 4))
    chosen = Plan.uniform(graph, n=2)
    with pytest.raises(PlanError, match="names '2', which is no layer or module"):
        replace(chosen, recompute=(("2",),)).check(graph)
    with pytest.raises(PlanError, match="names layer '0' in two segments"):
        replace(chosen, recompute=(("0",), ("0", "1"))).check(graph)


class Padded(nn.Module):
    """Steps of one module have its name, and some a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LocalResponseNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.exp())


def test_the_name_of_a_layer_is_not_that_of_its_modules_other_steps() -> None:
    graph = capture(Padded(), torch.zeros(2, 4, 6, 6))
    names = [layer.name for layer in graph.layers if layer.name.startswith("inner")]
    assert "inner" in names and len(names) > 2
    each = replace(Plan.uniform(graph, n=2), recompute=tuple((name,) for name in names))
    each.check(graph)
    assert sorted(each.segments(graph)) == sorted(names)


def test_what_does_not_fit_is_judged_with_layers_computed_again() -> None:
    blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(6)]
    model, x = (
        nn.Sequential(*(part for block in blocks for part in block)),
        torch.zeros(8, 8, 64, 64),
    )
    least = plan(model, x, cluster="2x10Gb", recompute="all").findings.prediction.memory
    found = plan(model, x, cluster="2x10Gb", memory=int(1.3 * least), recompute="auto")
    forced = found.why_not("6", "h=2").plan
    assert forced is not None and forced.recompute
    with pytest.raises(PlanError, match="computing again"):
        plan(model, x, cluster="2x10Gb", memory=least // 2, recompute="auto")
