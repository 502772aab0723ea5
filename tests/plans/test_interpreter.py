"""The interpreter of programs, on the machine that only counts time."""

from __future__ import annotations

import torch
from torch import nn

from shardwise import Config, Plan, capture, simulate
from shardwise.cluster.cluster import Cluster


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.conv(x)
        return y, y, x, x


def test_a_tensor_that_is_returned_twice_is_sent_once() -> None:
    graph = capture(Twice(), torch.zeros(4, 3, 8, 8))
    assert len(graph.outputs) == 4
    trace = simulate(Plan.uniform(graph, h=2), graph, Cluster.load("2x1Gb"))
    packed = [span.name for span in trace.spans if span.name.endswith("to all packed")]
    assert len(packed) == len(set(packed)) == 2


def test_what_is_written_into_a_plan_counts() -> None:
    graph = capture(Twice(), torch.zeros(4, 3, 8, 8))
    plan = Plan.uniform(graph, h=2)
    assert plan.configs(graph)["conv"] == Config(h=2)
    plan.layers["conv"] = Config(f=2)  # type: ignore[index]
    assert plan.configs(graph)["conv"] == Config(f=2)
