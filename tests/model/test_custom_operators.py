"""Operators and functions of others may be named like PyTorch's, and do something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exactness import assert_exact, seeded, seeded_input
from shardwise import Plan, capture


@torch.library.custom_op("strangers::sigmoid", mutates_args=())
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean()


@sigmoid.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


sigmoid.register_autograd(lambda ctx, gradient: gradient - gradient.mean())


class relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient - 2 * gradient.mean()


class Centred(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.conv(x)) * 2


@pytest.mark.parametrize("function", [lambda x: sigmoid(x), relu.apply], ids=["op", "function"])
def test_what_is_named_like_an_operator_of_torch_is_not_taken_for_it(function: Any) -> None:
    module, x = seeded(Centred(function)), seeded_input((3, 3, 6, 5))
    graph = capture(module, x)
    splits: tuple[dict[str, int], ...] = ({"n": 2}, {"h": 2}, {"f": 2}, {"w": 3})
    assert_exact(module, x, [Plan.uniform(graph, **split) for split in splits], graph)
