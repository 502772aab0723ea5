"""What users do with autograd, in forward and around it, is as on one device or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from exactness import seeded
from habits.habit import assert_refused, assert_same, image, net
from shardwise import Engine, Plan, ShardwiseError, capture, optimizer, parallelize
from shardwise.comm.in_process import InProcess, World


class Reverse(torch.autograd.Function):
    """The gradient reversed, as domain adaptation has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -ctx.scale * gradient, None


class Sign(torch.autograd.Function):
    """A sign whose gradient goes straight through; of the new kind, with a context of its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Halves(torch.autograd.Function):
    """Two results, and a weight, each with a gradient that is not theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, shift: int) -> Any:
        ctx.save_for_backward(weight)
        return x * weight, x + shift

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return 2 * first * weight - second, 3 * first.sum((0, 2, 3)).view(weight.shape), None


class Noise(torch.autograd.Function):
    """Rounding at random, whose gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 2 * gradient


class Writes(torch.autograd.Function):
    """Writes into what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


sign = Sign.apply  # as many modules have it


class Middle(nn.Module):
    """A network with something in its middle."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3)
        self.other, self.scale = nn.Conv2d(6, 6, 1), nn.Parameter(torch.ones(6, 1, 1))
        self.middle = [middle]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle[0](self, self.first(x))).mean((2, 3))


def without(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = model.other(x).sigmoid()
    return x * gate


def mixed(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = model.other(x)
        with torch.enable_grad():
            y = x * model.scale + gate
        both = y.relu() + gate
        low, high = both.chunk(2, 1)
    torch.set_grad_enabled(False)
    shift = model.scale * 2
    torch.set_grad_enabled(True)
    return y + torch.cat([high, low], 1) * model.scale + shift


def checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = checkpoint(model.other, x, use_reentrant=True)
    return checkpoint(model.other, x, use_reentrant=False)


MIDDLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "reversed": lambda model, x: Reverse.apply(model.other(x), 0.5),
    "reversed twice": lambda model, x: Reverse.apply(Reverse.apply(x, 1.0) + x, 1),
    "sign": lambda model, x: sign(model.other(x)) * x,
    "two results": lambda model, x: torch.cat(Halves.apply(x, model.scale, 2), 1)[:, 3:9],
    "one of two results": lambda model, x: Halves.apply(x, model.scale, 2)[1] * model.scale,
    "batch size": lambda model, x: Halves.apply(x, model.scale, x.shape[0])[0],
    "random": lambda model, x: Noise.apply(x) * torch.rand_like(x),
    "no gradients": without,
    "some gradients": mixed,
    "checkpointed": checkpointed,
}


def train(model: Any, x: torch.Tensor) -> Any:
    outputs = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        y = model(x + step)
        y.square().sum().backward()
        optimizer.step()
        outputs.append(y)
    with torch.no_grad():
        outputs.append(model.eval()(x))
    return outputs, torch.rand(1)  # generators are in step


@pytest.mark.parametrize("name", MIDDLES)
def test_forward_has_the_gradients_that_its_author_meant(name: str) -> None:
    assert_same(train, lambda: seeded(Middle(MIDDLES[name])))


def inference(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        gate = model.other(x)
    return x + gate


def writes(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.other(x)
    with torch.no_grad():
        y.clamp_(min=0)
    return y


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "inference": (inference, "uses torch.inference_mode.*; use torch.no_grad"),
    "writes": (writes, "writes in place .*clamp_.* under torch.no_grad"),
    "dirty": (lambda model, x: Writes.apply(x * 1), "'Writes' writes into its inputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forward_that_cannot_be_followed_is_refused_by_name(name: str) -> None:
    middle, sentence = REFUSED[name]
    model = seeded(Middle(middle))
    with pytest.raises(ShardwiseError, match=sentence):
        capture(model, image())


# -- around the model ------------------------------------------------------------------------------


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.one, self.two = nn.Conv2d(6, 4, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.trunk(x)).relu()
        return self.one(y), self.two(y.mean((2, 3)))


def heads() -> nn.Module:
    return seeded(Heads())


def test_a_graph_that_was_retained_is_gone_through_again() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        x.requires_grad_()
        one, two = model(x)
        one.square().sum().backward(retain_graph=True)
        two.square().sum().backward(retain_graph=True)
        (saliency,) = torch.autograd.grad((two * one.mean()).sum(), x, retain_graph=True)
        two.sum().backward()
        return one, two, saliency, x.grad

    assert_same(use, heads)


def test_a_graph_that_was_not_retained_is_refused_and_nothing_is_lost() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        one, two = model(x)
        one.sum().backward()
        try:
            two.sum().backward()
        except (ShardwiseError, RuntimeError) as error:
            assert "second time" in str(error)
        model.zero_grad()
        model(x)[1].square().sum().backward()

    assert_same(use, heads)


def test_second_derivatives_are_refused_whatever_the_loss() -> None:
    def penalty(model: Any, x: torch.Tensor) -> Any:
        x.requires_grad_()
        y = model(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (y + (gradient.norm() - 1) ** 2).backward()

    assert_refused(penalty, "the parallel Net has first derivatives only.* original model")


def test_a_graph_of_the_gradients_that_nobody_uses_does_no_harm() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        model(x).square().sum().backward(create_graph=True)
        assert all(p.grad.requires_grad for p in model.parameters() if p.grad is not None)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for param in model.parameters():
            param.grad = None if param.grad is None else param.grad.detach()

    assert_same(use)


def test_gradients_that_are_asked_for_fill_nothing() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        x.requires_grad_()
        one, two = model(x)
        (saliency,) = torch.autograd.grad(one.square().sum() + two.sum(), x)
        adversarial = (x + 0.1 * saliency.sign()).detach()
        model(adversarial)[0].square().sum().backward()
        return saliency, x.grad is None

    assert_same(use, heads)


def test_gradients_of_weights_that_are_asked_for_have_the_norms_of_whole_ones() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        found = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        return [gradient.norm() for gradient in found]

    assert_same(use)


@pytest.mark.parametrize("wait", ["backward", "step", "use"])
def test_gradients_that_are_asked_for_fill_nothing_whenever_sums_are_waited_for(wait: Any) -> None:
    plain, x = net(), image()
    wanted = [*plain.parameters()]
    y = plain(x).square().sum()
    expected = torch.autograd.grad(y, wanted[:1])[0]

    def work(comm: InProcess) -> bool:
        plan = Plan.uniform(capture(plain, x), h=2)
        model: Any = parallelize(plain, plan, comm=comm, gradients=Engine(wait=wait))
        given = x.clone().requires_grad_()
        seen: list[int] = []
        torch.autograd.grad(model(given).sum(), given)
        (found,) = torch.autograd.grad(model(x).square().sum(), [model.conv.weight])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        nothing = all(p.grad is None for p in model.parameters())
        model.conv.weight.register_hook(lambda g: seen.append(1))
        model(x).square().sum().backward()
        return nothing and seen == [1]

    assert all(World(2).run(work))


@pytest.mark.parametrize("wait", ["backward", "step", "use"])
def test_a_penalty_is_right_or_refused_whenever_sums_are_waited_for(wait: Any) -> None:
    def trains(model: Any, x: torch.Tensor, sgd: torch.optim.Optimizer) -> Any:
        for _ in range(2):
            penalty = model.conv.weight.square().sum()
            (model(x).square().sum() + penalty).backward()
            sgd.step()
            sgd.zero_grad()
        return model.state_dict()

    plain, x = net(), image()
    expected = trains(plain, x, torch.optim.SGD(plain.parameters(), lr=0.01))
    plan = Plan.uniform(capture(net(), x), h=2)

    def work(comm: InProcess) -> Any:
        model = parallelize(net(), plan, comm=comm, gradients=Engine(wait=wait))
        return trains(model, x, optimizer(model, torch.optim.SGD, lr=0.01))

    if wait == "step":
        with pytest.raises(ShardwiseError, match="while it was summed: a loss that depends"):
            World(2).run(work)
    else:
        for found in World(2).run(work):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_gradients_that_were_kept_stay_as_they_were() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        kept: list[list[torch.Tensor]] = []
        copies: list[list[torch.Tensor]] = []
        for scale in (1.0, 2.0, 3.0):
            model.zero_grad()
            sum(y.square().sum() for y in model(scale * x)).backward()  # type: ignore[union-attr]
            kept.append([p.grad for p in model.parameters() if p.grad is not None])
            copies.append([g.clone() for g in kept[-1]])
        return all(map(torch.equal, kept[0] + kept[1], copies[0] + copies[1]))

    assert_same(use, heads)


def test_heads_that_no_loss_uses_have_no_gradient_and_stay() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        for _ in range(2):
            model(x)[1].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(x)[1].sum().backward()
        return model.one.weight.grad is None

    assert_same(use, heads)
