"""The helper that compares habits notices what differs, and what is not refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from habits.habit import assert_refused, assert_same
from shardwise import ShardwiseError, of


def step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def test_a_training_loop_is_the_same() -> None:
    assert_same(step)


def test_what_differs_on_ranks_is_noticed() -> None:
    def differs(model: Any, x: torch.Tensor) -> Any:
        return model(x) * (1 if hasattr(model, "plan") else 2)

    with pytest.raises(AssertionError, match="n=2, rank 0: returned"):
        assert_same(differs)


def test_what_is_refused_is_refused_on_all_ranks() -> None:
    def refuses(model: Any, x: torch.Tensor) -> None:
        if hasattr(model, "plan") and of(model).comm.rank == 0:
            raise ShardwiseError("not like this")

    with pytest.raises(AssertionError, match="rank 1: all ranks wait"):
        assert_refused(refuses, "not like this", under=["n=2"])
