"""Attributes of modules are looked at before every pass, so that must cost next to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, capture, parallelize
from shardwise.model.attributes import Attributes


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1))
        self.factor, self.table = 2.0, torch.ones(4, 1, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.factor * self.table


def test_what_training_changes_is_no_reason_to_look_at_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, x, times = seeded(Scaled()), seeded_input((4, 3, 6, 6)), []
    model = parallelize(plain, Plan.uniform(capture(plain, x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    note = Attributes._note
    monkeypatch.setattr(Attributes, "_note", lambda self: times.append(1) or note(self))

    def step() -> int:
        times.clear()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(times)

    step()
    assert [step(), step()] == [0, 0]
    model.factor = 3.0
    assert step() > 0 and step() == 0
    model.table += 1
    assert step() > 0 and step() == 0
