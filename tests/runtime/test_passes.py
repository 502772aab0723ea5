"""What goes into a parallel model and comes out: inputs in parts, inputs returned, both modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exactness import assert_exact, seeded, seeded_input
from shardwise import Config, Plan, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box

SHAPE = (4, 3, 6, 6)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_an_input_that_one_worker_was_given_stays_there() -> None:
    plain, x = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())), seeded_input(SHAPE)
    plain(whole := x.clone().requires_grad_()).square().sum().backward()
    graph = capture(plain, x)
    plan = Plan.make(graph, 2, lambda layer: Config() if layer.op == "input" else Config(h=2))

    def work(comm: Communicator) -> tuple[Box, Any]:
        model: Any = parallelize(plain, plan, comm=comm)
        box = model.input_box(4)
        part = x[box.slices_in(Box.whole(SHAPE))].clone().requires_grad_()
        model(part, batch=4).square().sum().backward()
        return box, part.grad

    (box, gradient), (other, _) = World(2).run(work)
    assert box == Box.whole(SHAPE) and other.empty
    close(gradient, whole.grad)  # type: ignore[arg-type]


class Returns(nn.Module):
    """An autoencoder as many are written: it returns what it was given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv(x), x


@pytest.mark.parametrize("split", [{"n": 2}, {"h": 2}, {"f": 2}, {"n": 2, "w": 2}, {}])
def test_a_model_may_return_its_input(split: dict[str, int]) -> None:
    model, x = seeded(Returns()), seeded_input(SHAPE)
    graph = capture(model, x)
    assert_exact(model, x, [Plan.uniform(graph, **split), Plan.random(graph, 3, 1)], graph)


class Modes(nn.Module):
    """Another head for evaluation, and one layer whose weight both heads use."""

    def __init__(self) -> None:
        super().__init__()
        self.train_head, self.test_head = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.train_head(x) if self.training else self.test_head(x).relu()


@pytest.mark.parametrize("split", [{"n": 2}, {"f": 2}, {"c": 2}])
def test_parameters_that_only_evaluation_uses_are_whole_on_every_rank(split: Any) -> None:
    plain, x = seeded(Modes()), seeded_input((4, 4))
    plain(x).sum().backward()
    plain.eval()
    expected = plain(x)
    expected.square().sum().backward()

    def work(comm: Communicator) -> Any:
        model: Any = parallelize(plain.train(), Plan.uniform(capture(plain, x), **split), comm=comm)
        model(x).sum().backward()
        model.eval()
        y = model(x)
        y.square().sum().backward()
        return y.detach(), model.full_gradients(), model.state_dict()

    for y, gradients, state in World(2).run(work):
        close(y, expected)
        for name, param in plain.named_parameters():
            close(gradients[name], param.grad)  # type: ignore[arg-type]
            assert torch.equal(state[name], param)


class Crossed(nn.Module):
    """In evaluation a part of the weight that training left to another rank is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.training else self.weight.flip(0)
        return nn.functional.linear(x, weight)


def test_a_part_of_a_parameter_that_a_rank_does_not_hold_is_moved() -> None:
    plain, x = seeded(Crossed()), seeded_input((4, 4))
    expected = plain.eval()(x)
    expected.square().sum().backward()

    def work(comm: Communicator, split: dict[str, int]) -> Any:
        plan = Plan.uniform(capture(plain, x), **split)
        model: Any = parallelize(plain, plan, comm=comm).eval()
        y = model(x)
        model.zero_grad()
        y.square().sum().backward()
        return y.detach(), model.full_gradients()["weight"]

    for split in ({"f": 2}, {"c": 2}):
        for y, gradient in World(2).run(work, split):
            close(y, expected)
            close(gradient, plain.weight.grad)  # type: ignore[arg-type]


class Spaced(nn.Module):
    """Between numbers that are tensors; torch has no derivative for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(x[0], x[1], 5)


def test_an_operator_without_a_derivative_is_a_sentence_in_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    model = Spaced()
    plan = Plan.uniform(capture(model, x), n=2)

    def work(comm: Communicator) -> None:
        parallelize(model, plan, comm=comm)(x).sum().backward()

    with pytest.raises(ShardwiseError, match="derivative for aten::linspace is not implemented"):
        World(2).run(work)


def test_a_sparse_input_is_refused() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    plan = Plan.uniform(capture(model, x), n=2)

    def work(comm: Communicator) -> None:
        parallelize(model, plan, comm=comm)(x.to_sparse())

    with pytest.raises(ShardwiseError, match=r"is torch\.sparse_coo, and must be dense"):
        World(2).run(work)


def test_an_input_on_another_device_than_the_model_is_refused() -> None:
    plain, x = nn.Conv2d(3, 4, 3), torch.zeros(SHAPE)
    model = parallelize(plain, Plan.uniform(capture(plain, x)))
    with pytest.raises(ShardwiseError, match=r"'input' is on meta, and the model on cpu; give it"):
        model(x.to("meta"))
