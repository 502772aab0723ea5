"""Optimizers, learning rates, and samples that are mixed."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch
from torch import nn

from exactness import seeded
from pool import shared_pool
from shardwise import Plan, capture, parallelize
from shardwise.data import Loader, digits
from shardwise.data.order import mixing_share
from shardwise.geometry.box import Box
from shardwise.training.recipe import Lars, rate_at
from shardwise.training.settings import Settings

X_SHAPE = (5, 3, 7, 6)
SPLITS = ({"f": 2}, {"n": 2, "h": 2}, {"c": 3}, {"h": 3})


def net() -> nn.Module:
    return seeded(
        nn.Sequential(
            nn.Conv2d(3, 7, 3, padding=1),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(294, 4),
        )
    )


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y, torch.arange(5) % 4)


def lars_steps(split: dict[str, int]) -> dict[str, torch.Tensor]:
    x = torch.randn(X_SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = net()
    model = parallelize(module, Plan.uniform(capture(module, x), 4 if split else 1, **split))
    steppers = Lars(model.parameters(), 0.5, weight_decay=0.01, trust=0.02, norms=model.norms)
    for _ in range(4):
        steppers.zero_grad()
        loss_of(model(x)).backward()
        steppers.step()
    return model.state_dict()


@pytest.mark.parametrize("split", SPLITS)
def test_lars_sees_whole_layers_whatever_the_split(split: dict[str, int]) -> None:
    x = torch.randn(X_SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = net()
    stepper = Lars(plain.parameters(), 0.5, weight_decay=0.01, trust=0.02)
    for _ in range(4):
        stepper.zero_grad()
        loss_of(plain(x)).backward()
        stepper.step()
    found = shared_pool(4).run(lars_steps, split)[3]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_lars_scales_rates_as_the_paper_says() -> None:
    weight = torch.full((2, 2), 3.0, requires_grad=True)  # norm 6
    bias = torch.ones(2, requires_grad=True)
    stepper = Lars([weight, bias], lr=2.0, momentum=0.0, weight_decay=0.5, trust=0.1)
    (weight * 2).sum().backward()  # norm 4
    bias.sum().backward()
    stepper.step()
    rate = 0.1 * 6 / (4 + 0.5 * 6)
    torch.testing.assert_close(weight.data, torch.full((2, 2), 3 - 2.0 * rate * (2 + 0.5 * 3)))
    torch.testing.assert_close(bias.data, torch.full((2,), 1 - 2.0))


def norms(split: dict[str, int], p: float) -> torch.Tensor:
    x = torch.zeros(X_SHAPE, dtype=torch.float64)
    module = net()
    model = parallelize(module, Plan.uniform(capture(module, x), 4, **split))
    params = list(model.parameters())
    return model.norms(params, params, p)


@pytest.mark.parametrize("p", [1.0, 2.0, inf])
def test_norms_are_of_whole_parameters(p: float) -> None:
    wanted = torch.stack([param.detach().norm(p) for param in net().parameters()])
    for found in shared_pool(4).run(norms, {"n": 2, "f": 2}, p):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_rates_follow_the_recipe_of_large_batches() -> None:
    recipe = Settings(lr=0.1, lr_batch=256, batch=1024, warmup_epochs=5, schedule="step")
    assert rate_at(recipe, 0, 90) == pytest.approx(0.1)  # that of one small batch
    assert rate_at(recipe, 2.5, 90) == pytest.approx(0.25)
    assert [rate_at(recipe, e, 90) for e in (5, 29.9, 30, 60, 80)] == pytest.approx(
        [0.4, 0.4, 0.04, 0.004, 0.0004]
    )
    cosine = Settings(lr=0.2, warmup_epochs=2)
    assert [rate_at(cosine, e, 10) for e in (1, 2, 6, 10, 11)] == pytest.approx(
        [0.1, 0.2, 0.1, 0, 0]
    )
    assert rate_at(Settings(lr=0.2, schedule="constant"), 7, 10) == 0.2


def test_mixed_samples_are_the_same_for_any_part_of_the_batch() -> None:
    whole = next(iter(Loader(digits(), 10, mixup=0.4, seed=3)))
    part = next(
        iter(Loader(digits(), 10, mixup=0.4, seed=3, box=lambda n: Box((2, 0, 3, 0), (7, 1, 8, 8))))
    )
    assert 0 < whole.share < 1 and part.share == whole.share
    assert torch.equal(part.x, whole.x[2:7, :, 3:8])
    plain = next(iter(Loader(digits(), 10, seed=3)))
    neighbours = plain.x.roll(1, 0)
    assert torch.allclose(whole.x, whole.share * plain.x + (1 - whole.share) * neighbours)
    assert whole.mixed is not None and torch.equal(whole.mixed, plain.y.roll(1))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_have_the_spread_of_a_beta_distribution(alpha: float) -> None:
    shares = np.array([mixing_share(alpha, 0, epoch, 64) for epoch in range(600)])
    assert abs(shares.mean() - 0.5) < 0.05
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.2)
