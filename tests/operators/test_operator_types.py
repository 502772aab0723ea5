"""Operators on whole numbers, flags and numbers of few digits, and the numbers that they draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shape_cases import SHAPES, Apply
from shardwise import Plan, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World


def of_whole_numbers(x: Tensor) -> tuple[Tensor, ...]:
    """All of them exact in any type of whole numbers."""
    high, where = x.max(1)
    padded = functional.pad(x, (1, 2, 0, 1), value=3)
    return (
        x.roll((1, -2), (2, 3)).flip(1),
        torch.stack([x, x.tril(1)], 1),
        x.repeat(1, 2, 1, 1).cumsum(2),
        x.sort(1)[0] + x.sort(1)[1],
        x.topk(2, 3)[0],
        high * where,
        padded.unfold(2, 3, 2),
        x.sum(),
        x.sum((0, 2), dtype=torch.float32),
        (x > 2).any(1) | (x == 1).all(2)[:, :4, :4].any(),
        x.count_nonzero((1, 2)),
        x.prod(3),
        x[:, [0, 2]] << 1,
        x.gather(1, x.long() % x.shape[1]),
    )


def of_flags(x: Tensor) -> tuple[Tensor, ...]:
    flags = x > 1
    return (
        flags.roll(1, 2) ^ flags,
        flags.flip(3).any(2),
        flags.all(1),
        flags.cumsum(1),
        functional.pad(flags, (1, 1)),
        flags.sum(),
        flags.any(),
        flags.all(),
        torch.where(flags, x, -x),
        flags.max(1)[0],
    )


def _outputs(comm: Communicator, model: nn.Module, plan: Plan, x: Tensor) -> Any:
    return parallelize(model, plan, comm=comm)(x)


@pytest.mark.parametrize("function", [of_whole_numbers, of_flags])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_whole_numbers_are_the_same_bit_by_bit(function: Any, dtype: torch.dtype) -> None:
    model, x = Apply(function), torch.arange(480).reshape(3, 8, 5, 4).mul(7).remainder(5).to(dtype)
    graph, expected = capture(model, x), model(x)
    assert not [layer for layer in graph.layers if layer.op == "opaque"]
    plans = [Plan.uniform(graph, h=2, w=2), Plan.uniform(graph, n=2, f=2)]
    for plan in [*plans, *(Plan.random(graph, world, world) for world in (2, 3, 5))]:
        for found in World(plan.world).run(_outputs, model, plan, x):
            for y, right in zip(found, expected, strict=True):
                assert y.dtype == right.dtype and torch.equal(y, right)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_the_nearest_pixel_is_the_same_whatever_the_type(mode: str, dtype: torch.dtype) -> None:
    for scale in (1.1, 0.7, 2.1, 3 / 7, 1.9999):
        model = Apply(lambda x, s=scale: functional.interpolate(x, scale_factor=s, mode=mode))
        x = torch.arange(2 * 3 * 11 * 13).remainder(251).reshape(2, 3, 11, 13).to(dtype)
        plan = Plan.uniform(capture(model, x), h=3)
        for y in World(3).run(_outputs, model, plan, x):
            assert torch.equal(y, model(x))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "dtype, limit, smooth",
    [(torch.float32, 1e-6, False), (torch.float32, 1e-6, True), (torch.bfloat16, 8e-3, False)],
)
def test_resizing_keeps_the_digits_of_a_type(
    mode: str, dtype: torch.dtype, limit: float, smooth: bool
) -> None:
    size = (100, 37)
    model = Apply(lambda x: functional.interpolate(x, size=size, mode=mode, antialias=smooth))
    x = torch.randn(1, 2, 301, 41, generator=torch.Generator().manual_seed(0)).to(dtype)
    plan = Plan.uniform(capture(model, x), h=2, w=2)
    expected = model(x)
    for y in World(4).run(_outputs, model, plan, x):
        torch.testing.assert_close(y, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", SHAPES)
def test_what_moves_picks_reduces_resizes_and_draws_is_split(name: str) -> None:
    module, shape = SHAPES[name]
    graph = capture(module.double(), torch.zeros(shape).double())
    assert not [layer.traits.called for layer in graph.layers if layer.op == "opaque"]


def draws(x: Tensor) -> Tensor:
    y = functional.alpha_dropout(x, 0.2, True) + torch.bernoulli(x.sigmoid())
    return y + torch.poisson(x.exp()) + functional.rrelu(x, training=True) + torch.normal(x, 1.0)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_numbers_are_drawn_in_the_order_of_memory_and_generators_stay_in_step(
    memory_format: torch.memory_format,
) -> None:
    model, x = Apply(draws), torch.randn(3, 4, 5, 6).to(memory_format=memory_format)
    graph = capture(model, x)
    torch.manual_seed(7)
    expected, after = model(x), torch.rand(3)

    def work(comm: Communicator, plan: Plan) -> tuple[Tensor, Tensor]:
        parallel = parallelize(model, plan, comm=comm)
        torch.manual_seed(7)
        return parallel(x), torch.rand(3)

    for plan in (Plan.uniform(graph, h=2), Plan.uniform(graph, f=2), Plan.random(graph, 3, 1)):
        for y, then in World(plan.world).run(work, plan):
            torch.testing.assert_close(y, expected)
            assert torch.equal(then, after)
