"""torch.autocast around a parallel model: bfloat16 as with precision="bf16", or refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from habits.habit import EVERY, PLANS, assert_refused, assert_same, image, net
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
        found += [y.detach().float(), loss.detach().float()]
    model.norm.eps = 0.1
    with torch.no_grad(), around():
        found.append(model.eval()(x).float())
    return found


@pytest.mark.parametrize("name", EVERY)
def test_autocast_to_bfloat16_is_what_the_precision_bf16_is(name: str) -> None:
    size, make = PLANS[name]
    x = image().float()
    plan = make(capture(net().float(), x))
    alone = trains(net().float(), x, lowered)
    whole = trains(net().float(), x, nullcontext)

    def work(comm: InProcess) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        around = parallelize(net().float(), plan, comm=comm)
        inside = parallelize(net().float(), plan, comm=comm, precision="bf16")
        return trains(around, x, lowered), trains(inside, x, nullcontext)

    for found, expected in World(size).run(work):
        assert all(map(torch.equal, found, expected))
        assert found[0].dtype is torch.float32
        assert not torch.allclose(found[0], whole[0], rtol=1e-4)
        for mine, theirs in zip(found, alone, strict=True):
            assert (mine - theirs).norm() < 0.03 * theirs.norm()  # bfloat16 has 8 bits


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


def test_autocast_to_float16_is_refused() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        with lowered(dtype=torch.float16):
            model(x)

    sentence = "torch.autocast to float16 around a parallel model.* give it dtype=torch.bfloat16"
    single = {"build": lambda: net().float(), "inputs": lambda: image().float()}
    assert_refused(use, sentence, **single)


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
        assert message.startswith("rank 1 runs under torch.autocast where rank 0 does not")
