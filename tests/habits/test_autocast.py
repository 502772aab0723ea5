"""torch.autocast around a parallel model: the types and values of one device under it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from habits.habit import EVERY, PLANS, assert_same, image, net
from shardwise import ShardwiseError, capture, parallelize
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
