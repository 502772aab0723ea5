"""Ranks that do not do the same are told so, all of them, before anything is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, ShardwiseError, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import InProcess, World
from shardwise.errors import LostPeer
from shardwise.runtime.agreement import checksum

SHAPE = (4, 3, 6, 6)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )


def told(differ: Callable[[Any, torch.Tensor], Any], **split: int) -> list[str]:
    """What each of two ranks hears where rank 1 does something else after a step together."""

    def work(comm: Communicator) -> str:
        plain, x = seeded(net()), seeded_input(SHAPE)
        split_ = split or {"n": 2}
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), **split_), comm=comm)
        model(x).sum().backward()
        message = ""
        try:
            if comm.rank == 1:
                differ(model, x)
            else:
                model(x)
        except ShardwiseError as error:
            message = str(error)
        model.train()(x).sum().backward()  # all are still in step
        return message

    return World(2).run(work)


DIFFERENT: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "batch": (
        lambda model, x: model(x[:3]),
        "rank 1 runs a batch of 3 samples in training, and rank 0 a batch of 4 samples in training",
    ),
    "mode": (
        lambda model, x: model.eval()(x),
        "rank 1 runs a batch of 4 samples in evaluation, and rank 0 a batch of 4 samples in tr",
    ),
    "no gradients": (
        lambda model, x: torch.no_grad()(model)(x),
        "rank 1 runs a batch of 4 samples in training without gradients, and rank 0 a batch of 4",
    ),
    "parts": (
        lambda model, x: model(x[2:], batch=4),
        "rank 1 runs a batch of 4 samples in parts in training, and rank 0 a batch of 4 samples",
    ),
    "values": (lambda model, x: model(x + 1), "rank 1 was given another batch than rank 0; give"),
    "order": (lambda model, x: model(x.flip(0)), "rank 1 was given another batch than rank 0"),
    "one value": (lambda model, x: model(changed(x)), "rank 1 was given another batch than rank 0"),
    "input gradient": (
        lambda model, x: model(x.clone().requires_grad_()),
        "rank 1 has other parameters or inputs that require gradients than rank 0",
    ),
    "shape": (
        lambda model, x: model(x[..., :5]),
        "Sequential cannot be captured for input 4x3x6x5: a and b must have same reduction dim",
    ),
    "arguments": (lambda model, x: model(x, 3), "the model's forward cannot be called like this"),
}


def changed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[3, 2, 5, 5] += 1e-12
    return x


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_that_runs_something_else_is_named_to_all(name: str) -> None:
    differ, expected = DIFFERENT[name]
    first, second = told(differ)
    refused = name in ("shape", "arguments")
    assert second.startswith(expected)
    assert first.startswith(f"rank 1 refuses: {expected}" if refused else expected)


def frozen(model: Any, x: torch.Tensor) -> None:
    model[0].requires_grad_(False)
    try:
        model(x)
    finally:
        model[0].requires_grad_(True)


def one_norm(model: Any, x: torch.Tensor) -> None:
    model[1].eval()
    model(x)


def test_other_parameters_or_modules_on_one_rank_are_named() -> None:
    for message in told(frozen):
        assert message.startswith("rank 1 has other parameters or inputs that require gradients")
    for message in told(one_norm):
        assert message == "rank 1 has other modules in training mode than rank 0"


def test_every_batch_is_compared_not_only_the_first() -> None:
    def work(comm: Communicator) -> list[str]:
        plain, x = seeded(net()), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), n=2), comm=comm)
        heard = []
        for step in range(4):
            try:
                model(x + (comm.rank if step == 2 else 0)).sum().backward()
                heard.append("")
            except ShardwiseError as error:
                heard.append(str(error)[:36])
        return heard

    expected = ["", "", "rank 1 was given another batch than ", ""]
    assert World(2).run(work) == [expected, expected]


def test_a_rank_that_fails_ends_all_with_its_sentence() -> None:
    def fail(layer: str, y: torch.Tensor) -> None:
        raise MemoryError("no room for what the ReLU makes")

    def work(comm: Communicator) -> str:
        plain, x = seeded(net()), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), h=2), comm=comm)
        model(x).sum().backward()
        if comm.rank == 1:
            model._shardwise.watch = fail
        try:
            model(x)
        except (LostPeer, MemoryError) as error:
            return str(error)
        return ""

    heard = World(2).run(work)
    assert heard[1] == "no room for what the ReLU makes"
    assert heard[0] == "rank 1 failed: no room for what the ReLU makes"


@pytest.mark.parametrize("action", ["backward", "state_dict", "full_tensors", "clip"])
def test_a_rank_that_fails_in_anything_ranks_do_together_ends_all(action: str) -> None:
    def work(comm: InProcess) -> str:
        plain, x = seeded(net()), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), f=2), comm=comm)
        y = model(x).sum()
        try:
            comm.gather_objects(None)  # the other one is as far, or hears of it here
            if comm.rank == 1:
                comm._exchange = model._shardwise.lane._exchange = broken
            if action == "backward":
                y.backward()
            elif action == "state_dict":
                model.state_dict()
            elif action == "full_tensors":
                model.full_tensors()
            else:
                model.clip_grad_norm_(1.0)
        except Exception as error:
            return str(error)
        return ""

    def broken(*_: Any) -> None:
        raise OSError("the network is down")

    first, second = World(2).run(work)
    assert second == "the network is down"
    assert first == "rank 1 failed: OSError: the network is down"


def test_a_state_that_differs_between_ranks_is_not_loaded() -> None:
    def work(comm: Communicator) -> str:
        plain, x = seeded(net()), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), f=2), comm=comm)
        with pytest.raises(ShardwiseError) as refused:
            model.load_state_dict(seeded(net(), seed=comm.rank).state_dict())
        return str(refused.value)

    assert set(World(2).run(work)) == {"rank 1 loads another state than rank 0"}


def test_checksums_tell_tensors_apart_by_what_they_hold() -> None:
    x = seeded_input((64, 3, 40, 40)).float()  # more than is looked at
    assert checksum(x) == checksum(x.clone()) == checksum(x.to(memory_format=torch.channels_last))
    for other in (x.flip(0), x.flip(3), x + 1e-3, x[:63], x.double(), torch.cat([x[:63], -x[63:]])):
        assert checksum(other) != checksum(x)
    for kind in (torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        assert checksum(x.to(kind)) == checksum(x.to(kind)) != checksum(x.roll(1).relu().to(kind))
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))
    assert checksum(torch.empty(0)) == 0
