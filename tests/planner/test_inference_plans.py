"""Plans for inference: the costs of a forward pass, and the memory that it needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.cluster.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import capture
from shardwise.planner.best_plan import predict
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.memory import SLACK
from shardwise.planner.planned import plan
from shardwise.plans.plan import Plan


class Skips(nn.Module):
    """An early layer is read by the last one; norms sum statistics in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.norm, self.middle = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(torch.cat([y, self.middle(self.norm(y))], 1))


def captured(size: int = 32, training: bool = False) -> LayerGraph:
    return capture(Skips(), torch.zeros(1, 4, size, size), training=training)


def costs(graph: LayerGraph, output: str = "full", workers: int = 2) -> Costs:
    return Costs(graph, Cluster.load(f"{workers}x10Gb"), training=Training.none(output))


def test_memory_is_what_still_waits_and_what_a_layer_works_on() -> None:
    graph = captured()
    pixels, weights = 4 * 32 * 32, 4 * sum(p.numel() for p in Skips().parameters())
    statistics = 4 * 2 * 8
    # In the middle: what `first` made waits for the concatenation, 8 channels; the convolution
    # reads 8 and makes 8. At the end: cat's 16 channels and 4 more.
    found = predict(Plan.uniform(graph, 2), costs(graph))
    assert found.memory == round(SLACK * (weights + statistics + pixels * 32))


def test_nothing_is_kept_for_a_backward_pass() -> None:
    graph, trained = captured(), captured(training=True)
    chosen = Plan.uniform(trained, 2, h=2)
    training = Costs(trained, Cluster.load("2x10Gb"))
    assert (
        2 * predict(Plan.uniform(graph, 2, h=2), costs(graph)).memory
        < predict(chosen, training).memory
    )


def test_norms_in_evaluation_have_no_statistics_to_sum() -> None:
    graph, trained = captured(), captured(training=True)
    rows = {
        mode: {row.layer: row for row in predict(Plan.uniform(g, 2, h=2), made).rows}
        for mode, g, made in (
            ("evaluation", graph, costs(graph)),
            ("training", trained, Costs(trained, Cluster.load("2x10Gb"))),
        )
    }
    assert rows["evaluation"]["norm"].transfer == 0 < rows["training"]["norm"].transfer


def test_the_output_goes_to_all_ranks_to_one_or_nowhere() -> None:
    graph = captured()
    chosen = Plan.uniform(graph, 4, h=4)
    moved = {
        output: predict(chosen, costs(graph, output, workers=4)).rows[-1].moved
        for output in ("full", "one", "local")
    }
    whole = 4 * 4 * 32 * 32
    assert moved == {"full": 3 * whole, "one": 3 * whole // 4, "local": 0}


def test_it_can_be_planned_where_the_output_goes() -> None:
    x = torch.zeros(1, 4, 32, 32)
    moved = {
        output: plan(Skips(), x, cluster="2x10Gb", inference=True, output=output)
        .findings.prediction.rows[-1]
        .moved
        for output in ("full", "local")
    }
    assert moved["full"] > moved["local"] == 0
    with pytest.raises(PlanError, match="output 'none' must be one of full, local, one"):
        plan(Skips(), x, output="none")


@pytest.mark.parametrize("link", ["1Mb", "10Gb"])
def test_the_best_plan_is_never_slower_than_one_worker(link: str) -> None:
    found = plan(Skips(), torch.zeros(1, 4, 16, 16), cluster=f"4x{link}", inference=True)
    assert not found.training
    findings = found.findings
    assert findings.trace.seconds <= findings.rivals["one worker"].step_seconds * (1 + 1e-9)


def test_every_size_has_its_own_splits_and_keeps_the_limit() -> None:
    x = torch.zeros(1, 4, 16, 16)
    sizes = [(1, 4, 256, 200), (1, 4, 96, 128)]
    found = plan(Skips(), x, cluster="4x1Gb", memory="3MiB", inference=True, sizes=sizes)
    assert [other.inputs for other in found.others] == [(size,) for size in sizes]
    for each in (found, *found.others):
        assert each.findings.prediction.memory <= 3 << 20
    assert max(config.num_workers for config in found.layers.values()) == 1
    assert min(config.num_workers for config in found.others[0].layers.values()) > 1


def test_plans_for_inference_need_a_graph_of_evaluation() -> None:
    with pytest.raises(PlanError, match="training=False"):
        plan(captured(training=True), inference=True)


def test_a_size_that_does_not_fit_is_named() -> None:
    sizes = [(1, 4, 256, 200)]
    with pytest.raises(PlanError, match="for input 1x4x256x200, the model does not fit"):
        plan(Skips(), torch.zeros(1, 4, 16, 16), memory="1MiB", inference=True, sizes=sizes)
