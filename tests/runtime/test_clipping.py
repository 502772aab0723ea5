"""Clipping by the norm of all gradients, of which every rank has blocks."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)
    ).requires_grad_(True)


def gradients(model: Any, x: torch.Tensor, spoilt: float | None) -> None:
    """Gradients of a loss; one of them with a number that is none."""
    model(x).square().sum().backward()
    if spoilt is not None:
        model[3].bias.grad.fill_(spoilt)


def clipped(
    comm: Communicator, dtype: torch.dtype, norm_type: float, spoilt: float | None
) -> list[Any]:
    plain, x = seeded(net()).to(dtype), seeded_input((4, 3, 6, 6)).to(dtype)
    found = []
    for split in ({"f": 2}, {"n": 2}, {"c": 2}):
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), 2, **split), comm=comm)
        model(x).square().sum().backward()
        bias = dict(model.named_parameters())["3.bias"]
        if spoilt is not None and bias.grad is not None:
            bias.grad.fill_(spoilt)
        norm = model.clip_grad_norm_(0.5, norm_type, foreach=True)
        found.append((norm, model.full_gradients()))
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.5, inf, -inf, 0.0, -1.0])
def test_gradients_are_clipped_by_the_norm_of_any_order(norm_type: float) -> None:
    plain, x = seeded(net()), seeded_input((4, 3, 6, 6))
    gradients(plain, x, None)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    for norm, found in World(2).run(clipped, torch.float64, norm_type, None)[1]:
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spoilt", [nan, inf])
def test_a_norm_that_is_not_finite_spoils_all_gradients_as_torchs_does(spoilt: float) -> None:
    plain, x = seeded(net()), seeded_input((4, 3, 6, 6))
    gradients(plain, x, spoilt)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for _, found in World(2).run(clipped, torch.float64, 2.0, spoilt)[0]:
        for name, param in plain.named_parameters():
            assert torch.equal(found[name].isnan(), param.grad.isnan()), name  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_has_the_dtype_of_the_gradients(dtype: torch.dtype) -> None:
    for norm, _ in World(2).run(clipped, dtype, 2.0, None)[0]:
        assert norm.dtype == dtype and norm.shape == ()


def test_a_norm_that_is_not_finite_is_an_error_on_request() -> None:
    def work(comm: Communicator) -> str:
        plain, x = seeded(net()), seeded_input((4, 3, 6, 6))
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), 2, f=2), comm=comm)
        model(x * inf).sum().backward()
        with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is non-finite"):
            model.clip_grad_norm_(0.5, error_if_nonfinite=True)
        return "told"

    assert World(2).run(work) == ["told", "told"]
