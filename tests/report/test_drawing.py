"""The drawing of a layer graph: nothing overlaps, edges go down, branches stand side by side."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise import Plan, capture, zoo
from shardwise.report.drawing import HEIGHT, WIDTH, draw, grouped, spread


class Branches(nn.Module):
    """Two branches of different length, and a way around both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.left = nn.Conv2d(8, 8, 1)
        self.right = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return torch.cat([self.left(x), self.right(x), x], 1)


BRANCHES = capture(Branches(), torch.zeros(4, 3, 8, 8))


def test_layers_that_keep_shape_and_split_are_drawn_together() -> None:
    plan = Plan.uniform(BRANCHES, n=2)
    assert grouped(BRANCHES, plan) == [
        ["x"],
        ["stem.0", "stem.1", "stem.2"],
        ["left"],
        ["right.0", "right.1"],
        ["right.2"],
        ["cat"],
    ]


def test_a_layer_with_another_split_is_drawn_apart() -> None:
    mixed = dict(Plan.uniform(BRANCHES, n=2).layers)
    mixed["stem.2"] = Plan.uniform(BRANCHES, h=2).layers["stem.2"]
    plan = Plan.make(BRANCHES, 2, lambda layer: mixed[layer.name])
    assert ["stem.0", "stem.1"] in grouped(BRANCHES, plan)
    assert ["stem.2"] in grouped(BRANCHES, plan)


def test_branches_stand_side_by_side_and_meet_below() -> None:
    drawing = draw(BRANCHES, Plan.uniform(BRANCHES, n=2))
    at = {block.layers[0]: block for block in drawing.blocks}
    assert at["left"].y == at["right.0"].y
    assert abs(at["left"].x - at["right.0"].x) >= WIDTH
    assert at["cat"].y > at["right.2"].y > at["right.0"].y > at["stem.0"].y > at["x"].y


@pytest.mark.parametrize(
    "name", ["digits", "resnet34", pytest.param("googlenet", marks=pytest.mark.deep)]
)
def test_nothing_overlaps_and_every_edge_goes_down_around_the_blocks(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    graph = capture(model, torch.empty(zoo.input_shape(name, 4), device="meta"))
    drawing = draw(graph, Plan.uniform(graph, n=2))
    assert sorted(n for block in drawing.blocks for n in block.layers) == sorted(graph.by_name)
    for i, one in enumerate(drawing.blocks):
        assert WIDTH / 2 <= one.x <= drawing.width - WIDTH / 2
        assert 0 <= one.y <= drawing.height - HEIGHT
        for other in drawing.blocks[:i]:
            assert one.y != other.y or abs(one.x - other.x) >= WIDTH
    for edge in drawing.edges:
        assert all(a[1] < b[1] for a, b in pairwise(edge.points))
        for x, y in edge.points[1:-1]:
            for block in drawing.blocks:
                inside = block.y < y < block.y + HEIGHT or y in (block.y, block.y + HEIGHT)
                assert not (inside and abs(x - block.x) < WIDTH / 2)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3)), min_size=1, max_size=12))
def test_spread_keeps_the_gaps_and_moves_nothing_that_has_room(
    items: list[tuple[float, float]],
) -> None:
    wanted, gaps = [want for want, _ in items], [gap for _, gap in items[1:]]
    places = spread(wanted, gaps)
    for (a, b), gap in zip(pairwise(places), gaps, strict=True):
        assert b - a >= gap - 1e-6
    if all(b - a >= gap for (a, b), gap in zip(pairwise(wanted), gaps, strict=True)):
        assert places == pytest.approx(wanted, abs=1e-6)
