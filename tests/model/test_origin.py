"""A model that was captured for its plan is not captured again, unless something has changed."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from exactness import seeded
from shardwise.model import torch_export

FACTOR, TERMS = 2.0, [1.0, 2.0]


def helper(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x * term for term in TERMS]).sum(0)


class Net(nn.Module):
    power = 1

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.act(self.conv(x)) * self.scale * FACTOR * self.power)


def change_nothing(model: nn.Module, patch: Any) -> None:
    pass


def change_attribute(model: Any, patch: Any) -> None:
    model.scale = 3.0


def change_module(model: Any, patch: Any) -> None:
    model.act = nn.Tanh()


def change_class(model: nn.Module, patch: Any) -> None:
    patch.setattr(Net, "power", 3)


def change_global(model: nn.Module, patch: Any) -> None:
    patch.setitem(globals(), "FACTOR", 5.0)


def change_what_a_helper_reads(model: nn.Module, patch: Any) -> None:
    patch.setitem(globals(), "TERMS", [1.0, 5.0])


def change_forward(model: Any, patch: Any) -> None:
    patch.setattr(Net, "forward", lambda self, x: self.conv(x))


def freeze(model: Any, patch: Any) -> None:
    model.conv.weight.requires_grad_(False)


CHANGES = [change_attribute, change_module, change_class, change_global, change_forward, freeze]
CHANGES.append(change_what_a_helper_reads)


@pytest.mark.parametrize("change", [change_nothing, *CHANGES])
def test_a_model_is_captured_again_only_when_it_has_changed(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = seeded(Net()).float(), torch.randn(2, 3, 6, 6)
    plan = shardwise.plan(model, x, cluster="1x1Gb")
    change(model, monkeypatch)
    exported = mock.Mock(wraps=torch_export._export)
    monkeypatch.setattr(torch_export, "_export", exported)
    try:
        parallel = shardwise.parallelize(model, plan)
    except shardwise.PlanError:  # it has other layers now
        assert change in (change_module, change_forward)
        return
    torch.testing.assert_close(parallel(x), model(x))
    assert exported.called == (change is not change_nothing)


def test_captures_are_given_away_once() -> None:
    model, x = seeded(Net()).float(), torch.randn(2, 3, 6, 6)
    plan = shardwise.plan(model, x, cluster="1x1Gb")
    first, second = (shardwise.parallelize(model, plan) for _ in range(2))
    first.scale = 4.0
    torch.testing.assert_close(first(x), 4 * model(x))
    torch.testing.assert_close(second(x), model(x))


def test_plans_are_pickled_without_what_they_were_captured_with() -> None:
    model, x = seeded(Net()).float(), torch.randn(2, 3, 6, 6)
    plan = shardwise.plan(model, x, cluster="1x1Gb")
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and again.findings.costs.graph.origin is None
    torch.testing.assert_close(shardwise.parallelize(model, again)(x), model(x))


def test_an_input_without_memory_takes_none() -> None:
    with torch.device("meta"):
        model, x = Net(), torch.empty(1 << 24, 3, 64, 64)  # 768 GiB
    assert shardwise.capture(model, x)["conv"].shape == (1 << 24, 4, 64, 64)
