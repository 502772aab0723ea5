"""Parameters of which a model uses a part, or nothing: no rank forgets the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exactness import assert_exact, seeded, seeded_input
from shardwise import Plan, capture


class Used(nn.Module):
    """Positions for more columns than there are, as where they are cut to the length of inputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.positions = size, nn.Parameter(torch.zeros(1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.positions[:, : self.size].sum(1, keepdim=True) + 1.0


@pytest.mark.parametrize("size", [0, 1, 4, 7])
def test_what_is_not_used_of_a_parameter_is_kept(size: int) -> None:
    module, x = seeded(Used(size)), seeded_input((3, 4))
    graph = capture(module, x)
    plans = [Plan.uniform(graph, n=3), Plan.uniform(graph, f=4)]
    plans += [Plan.random(graph, world, seed) for seed, world in enumerate((2, 3, 4, 4))]
    assert_exact(module, x, plans, graph)
