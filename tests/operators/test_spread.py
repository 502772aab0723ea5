"""Norms of vectors, variances and deviations: where their parts lie, and who sums them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exactness import assert_exact, seeded_input
from shardwise import Config, Plan, capture
from shardwise.graph.layer_graph import Layer
from shardwise.operators import STRATEGIES, Split


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * 2)


def layer_of(function: Any, *shape: int) -> Layer:
    return capture(Call(function), torch.zeros(shape)).layers[-1]


def test_a_norm_over_space_that_is_split_sums_one_number_per_group() -> None:
    layer = layer_of(lambda x: x.norm(dim=(2, 3)), 2, 6, 8, 4)
    strategy, split = STRATEGIES["spread"], Split.of(layer, Config(h=4), 4)
    sums = strategy.sums(split)
    assert sums is not None and sums.shape == (1, 2, 6) and set(sums.numels) == {12}
    assert strategy.needs(split)[0].layout[1].shape == (2, 6, 2, 4)
    assert strategy.output(split).is_partition


def test_a_variance_over_space_that_is_split_sums_two_numbers_per_group() -> None:
    layer = layer_of(lambda x: x.var((2, 3)), 2, 6, 8, 4)
    sums = STRATEGIES["spread"].sums(Split.of(layer, Config(h=2, w=2), 4))
    assert sums is not None and sums.shape == (2, 2, 6)


@pytest.mark.parametrize("order", [0, 0.5, float("inf"), -1])
def test_norms_that_are_no_sums_need_their_dimensions_whole(order: float) -> None:
    layer = layer_of(lambda x: torch.linalg.vector_norm(x, order, (2, 3)), 2, 6, 8, 4)
    assert STRATEGIES["spread"].axes(layer).keys() <= {"n", "f", "c"}


def test_deviations_keep_the_digits_of_values_far_from_nought() -> None:
    module = Call(lambda x: (x * 1e-5 + 1.0).std((2, 3)))
    x = seeded_input((3, 4, 6, 5))
    graph = capture(module, x)
    assert_exact(module, x, [Plan.uniform(graph, h=2), Plan.uniform(graph, h=3, w=2)], graph)


def test_a_rank_without_a_part_takes_part_in_sums_on_the_way_back_too() -> None:
    """Rank 0 has none of the deviations, and of what is joined only what is no deviation."""
    module = Call(lambda x: torch.cat([x.std((2, 3)), x[:, :, 0, 0]], 1))
    x = seeded_input((2, 1, 4, 3))
    graph = capture(module, x)
    configs = {"std": Config(h=2), "cat": Config(f=2, ranks=(1, 0))}
    plan = Plan.make(graph, 2, lambda layer: configs.get(layer.name, Config()))
    assert_exact(module, x, [plan], graph)
