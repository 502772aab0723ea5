"""torch.autocast around a parallel model: the types and values of one device under it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from habits.habit import EVERY, PLANS, assert_same, image, net
from shardwise import Plan, ShardwiseError, capture, of, parallelize
from shardwise.comm.in_process import InProcess, World


def lowered(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", **({"dtype": torch.bfloat16} | options))


def trains(model: Any, x: torch.Tensor, around: Any) -> list[torch.Tensor]:
    """Outputs and losses of two steps, and of evaluation after a change that is captured again."""
    found = []
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        with around():
            y = model(x)
            loss = y.square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        found += [y.detach(), loss.detach()]
    model.norm.eps = 0.1
    with torch.no_grad(), around():
        found.append(model.eval()(x))
    return found


@pytest.mark.parametrize(
    "dtype, precision, digits", [(torch.bfloat16, "bf16", 0.03), (torch.float16, "fp16", 0.004)]
)
@pytest.mark.parametrize("name", EVERY)
def test_autocast_computes_what_one_device_computes_under_it(
    name: str, dtype: torch.dtype, precision: Any, digits: float
) -> None:
    size, make = PLANS[name]
    x, around = image().float(), partial(lowered, dtype=dtype)
    plan = make(capture(net().float(), x))
    alone = trains(net().float(), x, around)
    whole = trains(net().float(), x, nullcontext)

    def work(comm: InProcess) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outside = parallelize(net().float(), plan, comm=comm)
        inside = parallelize(net().float(), plan, comm=comm, precision=precision)
        return trains(outside, x, around), trains(inside, x, nullcontext)

    for found, inside in World(size).run(work):
        assert [y.dtype for y in found] == [y.dtype for y in alone]
        assert all(y.dtype is torch.float32 for y in inside)
        assert torch.equal(found[0].float(), inside[0])
        assert not torch.allclose(found[0].float(), whole[0], rtol=1e-4)
        for mine, theirs in zip(found, alone, strict=True):
            assert (mine - theirs).norm() < digits * theirs.norm()


def test_autocast_that_is_not_enabled_changes_nothing() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return trains(model, x, lambda: lowered(enabled=False))

    assert_same(use)


def test_autocast_leaves_float64_alone_as_torch_does() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        with lowered():
            y = model(x)
            y.square().sum().backward()
        return y

    assert_same(use)


def test_autocast_on_one_rank_is_named_to_all() -> None:
    x = image().float()
    plan = PLANS["n=2"][1](capture(net().float(), x))

    def work(comm: InProcess) -> str:
        model = parallelize(net().float(), plan, comm=comm)
        try:
            with lowered(enabled=comm.rank == 1):
                model(x)
        except ShardwiseError as error:
            return str(error)
        return ""

    for message in World(2).run(work):
        assert message.startswith("rank 1 runs under another torch.autocast than rank 0")


class OwnRegions(nn.Module):
    """Lowers some layers itself, and keeps others from being lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)  # the norm takes it away
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.linear = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.norm(self.first(x))
            with torch.autocast("cpu", enabled=False):
                z = self.second(y.float()).relu()
            mean = self.linear((y + z).mean((2, 3)))
        return self.linear(mean.float() @ mean.new_ones(3, 4).float()), y, z, mean


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("split", [{}, {"n": 2}, {"h": 2}, {"f": 2}, {"c": 2}], ids=str)
def test_autocast_of_the_models_own_is_that_of_one_device(
    split: dict[str, int], around: bool
) -> None:
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    plain, world = OwnRegions(), max(split.values(), default=1)
    plan = Plan.uniform(capture(plain, x), world, **split)

    def trained(model: Any) -> list[torch.Tensor]:
        with lowered(enabled=around):
            outputs = model(x)
        sum(y.float().square().sum() for y in outputs).backward()
        whole = of(model).full_gradients() if "_shardwise" in vars(model) else None
        named = whole or {name: p.grad for name, p in model.named_parameters()}
        return [*(y.detach() for y in outputs), *(named[name] for name in sorted(named))]

    expected = trained(copy.deepcopy(plain))

    def work(comm: InProcess) -> list[torch.Tensor]:
        return trained(parallelize(copy.deepcopy(plain), plan, comm=comm))

    for found in World(world).run(work):
        assert [y.dtype for y in found] == [y.dtype for y in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() <= 0.03 * theirs.norm() + 0.03
