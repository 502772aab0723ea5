"""Gradients come as autograd gives them on one device: where, when, and to whom."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, ShardwiseError, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World

SHAPE = (4, 3, 6, 6)
SPLITS = [{"n": 2}, {"h": 2}, {"f": 2}, {"c": 2}]


class Heads(nn.Module):
    """Two heads on one trunk, one more that is cut off, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.first, self.second, self.cut = (nn.Linear(4, n) for n in (5, 3, 2))
        self.before = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.first(y), {"second": self.second(y), "cut": self.cut(self.before(y).detach())}


def same(plain: nn.Module, x: torch.Tensor, use: Callable[[Any, torch.Tensor], Any]) -> None:
    """What `use` makes of the model and its gradients is the same alone and under splits."""

    def gradients(model: Any, x: torch.Tensor) -> tuple[Any, Any]:
        model.zero_grad()
        found = use(model, x)
        whole = model.full_gradients if hasattr(model, "full_gradients") else None
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return found, {n: g.clone() for n, g in (whole() if whole else named).items()}

    expected, wanted = gradients(copy.deepcopy(plain), x.clone())

    def work(comm: Communicator, split: dict[str, int]) -> Any:
        plan = Plan.uniform(capture(plain, x), **split)
        return gradients(parallelize(plain, plan, comm=comm), x.clone())

    for seed, split in enumerate(SPLITS):
        for found, given in World(2, seed).run(work, split):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            assert given.keys() == wanted.keys(), split
            for name, gradient in wanted.items():
                torch.testing.assert_close(given[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("used", ["first", "second", "cut", "both"])
def test_parameters_that_the_loss_does_not_depend_on_have_no_gradient(used: str) -> None:
    def use(model: Any, x: torch.Tensor) -> None:
        first, others = model(x)
        outputs = {"first": first, **others}
        chosen = [first, others["second"]] if used == "both" else [outputs[used]]
        sum(y.square().sum() for y in chosen).backward()  # type: ignore[union-attr]

    same(seeded(Heads()).eval(), seeded_input(SHAPE), use)


def test_outputs_that_depend_on_nothing_trained_require_no_gradient() -> None:
    plain, x = seeded(Heads()), seeded_input(SHAPE)
    plain.requires_grad_(False)
    plain.second.requires_grad_(True)
    model: Any = parallelize(plain, Plan.uniform(capture(plain, x)))
    first, others = model(x)
    assert not first.requires_grad and others["second"].requires_grad
    plain.requires_grad_(False)
    assert not parallelize(plain, Plan.uniform(capture(plain, x)))(x)[0].requires_grad


def test_gradients_that_somebody_kept_stay_as_they_were() -> None:
    def kept(comm: Communicator) -> bool:
        plain, x = seeded(Heads()), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), n=2), comm=comm)
        model(x)[0].sum().backward()
        first, second = model.first.weight.grad, model.conv.weight.grad.view(-1)
        before = first.clone(), second.clone()
        for _ in range(2):
            model.zero_grad()
            model(2 * x)[0].square().sum().backward()
        same = torch.equal(first, before[0]) and torch.equal(second, before[1])
        return same and not torch.equal(first, model.first.weight.grad)

    assert all(World(2).run(kept))


def test_gradients_add_up_in_place() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        model(x)[0].sum().backward()
        weight = model.first.weight.grad
        model(2 * x)[0].square().sum().backward()
        (model(x)[0].sum() + model(x + 1)[0].sum()).backward()
        model.zero_grad(set_to_none=False)
        model(x)[0].sum().backward()
        return model.first.weight.grad is weight

    same(seeded(Heads()), seeded_input(SHAPE), use)


def test_gradients_of_inputs_alone_leave_those_of_parameters_alone() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        x.requires_grad_()
        (saliency,) = torch.autograd.grad(model(x)[0].square().sum(), x)
        return saliency

    same(seeded(Heads()), seeded_input(SHAPE), use)


def test_gradients_of_some_parameters_may_be_asked_for() -> None:
    plain, x = seeded(Heads()), seeded_input(SHAPE)
    model: Any = parallelize(plain, Plan.uniform(capture(plain, x)))
    for wanted in ("conv.weight", "first.bias"):
        found, expected = (
            torch.autograd.grad(m(x)[0].square().sum(), m.get_parameter(wanted))[0]
            for m in (model, plain)
        )
        torch.testing.assert_close(found, expected)
    assert model.conv.weight.grad is None
    model(x)[0].sum().backward(inputs=[model.first.weight])
    assert model.first.weight.grad is not None and model.conv.weight.grad is None


def triple(param: Any) -> None:
    param.grad.mul_(3)


def test_hooks_of_parameters_see_the_whole_gradient_of_a_block_once() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        seen: list[float] = []
        model.first.bias.register_hook(lambda g: (seen.append(0.0), g.clamp(-0.5, 0.5))[1])
        model.second.weight.register_post_accumulate_grad_hook(triple)
        first, others = model(x)
        (first.square().sum() + others["second"].sum()).backward()
        return len(seen) <= 1  # a rank without a block has nothing to see

    same(seeded(Heads()), seeded_input(SHAPE), use)


def test_second_derivatives_are_refused() -> None:
    plain, x = seeded(Heads()), seeded_input(SHAPE).requires_grad_()
    model: Any = parallelize(plain, Plan.uniform(capture(plain, x)))
    y = model(x)[0].square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(ShardwiseError, match=r"Heads has first derivatives only.*original model"):
        gradient.square().sum().backward()


def test_a_second_way_back_is_refused_with_what_to_do() -> None:
    plain, x = seeded(Heads()), seeded_input(SHAPE)
    first, others = parallelize(plain, Plan.uniform(capture(plain, x)))(x)
    first.sum().backward()
    with pytest.raises(ShardwiseError, match=r"second time.* retain_graph=True, or add up the"):
        others["second"].sum().backward()


def test_losses_of_different_outputs_on_different_ranks_are_refused() -> None:
    def work(comm: Communicator) -> str:
        plain, x = seeded(Heads()), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), n=2), comm=comm)
        first, others = model(x)
        with pytest.raises(ShardwiseError) as refused:
            (first if comm.rank else others["second"]).sum().backward()
        return str(refused.value)[:60]

    expected = "the loss of rank 1 depends on other outputs than that of ran"
    assert World(2).run(work) == [expected] * 2


class Sums(nn.Module):
    """Two parameters whose gradients are one and the same tensor, spread out from one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.a + self.b)


def test_no_two_gradients_share_memory() -> None:
    plain, x = seeded(Sums()), seeded_input((3, 4))
    model: Any = parallelize(plain, Plan.uniform(capture(plain, x)))
    model(x).sum().backward()
    model.a.grad.mul_(2)
    assert torch.equal(model.b.grad, torch.full((4,), 3.0, dtype=torch.float64))
    assert model.clip_grad_norm_(1.0) > 1


def test_a_batch_of_no_samples_gives_outputs_and_gradients_of_nothing() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        first, others = model(x[:0].requires_grad_())
        (first.sum() + 0 * others["second"].sum()).backward()
        return first.detach(), others["cut"].detach()

    plain = seeded(Heads())
    same(plain, seeded_input(SHAPE), use)
    same(plain.eval(), seeded_input(SHAPE), use)


def test_a_batch_of_no_samples_is_refused_where_the_output_is_no_sample() -> None:
    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean()

    plain, x = seeded(Mean(3, 2)), seeded_input((4, 3))
    model = parallelize(plain, Plan.uniform(capture(plain, x)))
    with pytest.raises(ShardwiseError, match="'mean' does not consist of samples, and a batch of"):
        model(x[:0])


def test_many_batch_sizes_leave_one_set_of_buffers_and_few_graphs() -> None:
    def work(comm: Communicator) -> Any:
        plain, x = seeded(Heads()), seeded_input(SHAPE)
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), n=2), comm=comm)
        state, places = model._shardwise, set()
        for step in range(70):
            model.train(step % 3 > 0)
            model.zero_grad()
            model(seeded_input((2 + step % 23, 3, 6, 6)))[0].sum().backward()
            places.add(model.first.weight.grad.data_ptr())
        gc.collect()
        graphs = [len(captured._graphs) for captured in state.programs.graph._captured.values()]
        return len(places), state.programs.num_kept, len(state.gradients._buffers._data), graphs

    assert World(2).run(work) == [(1, 8, 1, [8, 8])] * 2
