"""Ranks that compute other losses of the same output are told so, in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from exactness import seeded, seeded_input
from shardwise import Plan, ShardwiseError, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World

SHAPE = (64, 3, 6, 6)
LABELS = torch.arange(64) % 5
OTHER = LABELS.clone()
OTHER[17] = 0


def net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)))


def losses(
    differ: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float64, **split: int
) -> list[str]:
    """What each of two ranks hears where rank 1 has another loss, after a step together."""

    def work(comm: Communicator) -> str:
        plain, x = net().to(dtype), seeded_input(SHAPE).to(dtype)
        plan = Plan.uniform(capture(plain, x), **(split or {"n": 2}))
        model: Any = parallelize(plain, plan, comm=comm)
        sgd, message = torch.optim.SGD(model.parameters(), lr=1e-3), ""
        loss = functional.cross_entropy(model(x), LABELS)
        loss.backward()
        sgd.step()
        before = [p.grad.clone() for p in model.parameters()]
        y = model(x)
        try:
            (differ(y) if comm.rank == 1 else functional.cross_entropy(y, LABELS)).backward()
        except ShardwiseError as error:
            message = str(error)
            kept = zip(before, model.parameters(), strict=True)
            assert all(torch.equal(g, p.grad) for g, p in kept)  # nothing was added
        functional.cross_entropy(model(x), LABELS).backward()  # all are still in step
        sgd.step()
        return message

    return World(2).run(work)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one label": lambda y: functional.cross_entropy(y, OTHER),
    "order": lambda y: functional.cross_entropy(y, LABELS.flip(0)),
    "scale": lambda y: 1.01 * functional.cross_entropy(y, LABELS),
    "sum": lambda y: functional.cross_entropy(y, LABELS, reduction="sum"),
    "weights": lambda y: functional.cross_entropy(y, LABELS, torch.arange(1.0, 6.0).to(y.dtype)),
    "smoothing": lambda y: functional.cross_entropy(y, LABELS, label_smoothing=0.05),
    "infinite": lambda y: functional.cross_entropy(y, LABELS) / 0.0,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_rank_with_another_loss_is_named_to_all(name: str) -> None:
    for split in ({"n": 2}, {"f": 2}):
        for message in losses(OTHERS[name], **split):
            assert message.startswith("the loss of rank 1 is another than that of rank 0"), message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_other_machines_round_otherwise_is_the_same_loss(dtype: torch.dtype) -> None:
    for noise in (1e-6, -1e-5):
        found = losses(lambda y: (1 + noise) * functional.cross_entropy(y, LABELS), dtype)  # noqa: B023
        assert found == ["", ""]


def test_a_loss_that_is_not_finite_is_the_same_on_all_ranks() -> None:
    def work(comm: Communicator) -> bool:
        plain, x = net(), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), n=2), comm=comm)
        (model(x).sum() * float("nan")).backward()
        return all(bool(p.grad.isnan().any()) for p in model.parameters())

    assert World(2).run(work) == [True, True]


class Heads(nn.Module):
    """Two heads, of which a loss may use one, and a large output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 2, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.two(x)


def test_every_output_is_compared_and_of_large_ones_a_part() -> None:
    def work(comm: Communicator, case: int) -> str:
        plain, x = seeded(Heads()), seeded_input((2, 3, 160, 160))  # more than is looked at
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), h=2), comm=comm)
        one, two = model(x)
        loss = one.square().sum() + two.square().sum()
        if comm.rank == 1:
            loss = (loss + one[..., ::2].sum(), loss + two.square().mean() * 100, one.sum())[case]
        try:
            loss.backward()
        except ShardwiseError as error:
            return str(error)
        return ""

    sentences = ["is another than", "is another than", "depends on other outputs than"]
    for case, sentence in enumerate(sentences):
        for message in World(2).run(work, case):
            assert message.startswith(f"the loss of rank 1 {sentence}"), message


def test_each_rank_may_have_a_loss_of_its_own_part() -> None:
    def work(comm: Communicator) -> torch.Tensor:
        plain, x = net(), seeded_input(SHAPE)
        plan = Plan.uniform(capture(plain, x), n=2)
        model: Any = parallelize(plain, plan, comm=comm, output="local")
        box = model.output_box(64)
        y = model(x)
        functional.cross_entropy(
            y, LABELS[box.starts[0] : box.stops[0]], reduction="sum"
        ).backward()
        return model.full_gradients()["0.weight"]

    plain = net()
    functional.cross_entropy(plain(seeded_input(SHAPE)), LABELS, reduction="sum").backward()
    for found in World(2).run(work):
        torch.testing.assert_close(found, plain[0].weight.grad)
