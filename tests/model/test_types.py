"""Types of inputs and parameters: whatever they are, ranks without a part of a layer know them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from exactness import assert_exact, seeded_input
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.errors import ShardwiseError
from shardwise.model.capture import capture
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import parallelize


class Net(nn.Module):
    """A renorm lies on one rank only, so that the other has to know what it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.renorm(self.norm(self.conv(x)).relu(), 2, 1, 3.0)
        return self.head(y.to(self.conv.weight.dtype).mean((2, 3)))


def outputs(plan: Plan, net: nn.Module, change: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    def work(comm: Communicator) -> torch.Tensor:
        model = change(parallelize(net, plan, comm=comm))
        y = model(*inputs)
        y.float().square().mean().backward()
        return y.detach()

    return World(plan.world).run(work)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_may_change_its_type_after_it_was_split(dtype: torch.dtype) -> None:
    net, x = Net(), torch.randn(4, 3, 8, 8)
    plan = Plan.uniform(capture(net, x), h=2)
    expected = Net()
    expected.load_state_dict(net.state_dict())
    expected = expected.to(dtype)(x.to(dtype))
    for y in outputs(plan, net, lambda model: model.to(dtype), x.to(dtype)):
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)


def test_a_model_without_parameters_takes_inputs_of_any_type() -> None:
    class Flip(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.flip(x, [1]) * 2

    def work(comm: Communicator, plan: Plan, x: torch.Tensor) -> torch.Tensor:
        return parallelize(Flip(), plan, comm=comm)(x)

    for dtype in (torch.float64, torch.float16, torch.int32, torch.complex64):
        x = torch.arange(12).reshape(4, 3).to(dtype)
        plan = Plan.uniform(capture(Flip(), x), n=2)
        for y in World(2).run(work, plan, x):
            assert torch.equal(y, Flip()(x))


def test_whole_numbers_are_inputs_too_and_a_plan_file_remembers_it() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.table = nn.Conv2d(3, 6, 3), nn.Embedding(10, 6)

        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(self.conv(x).mean((2, 3)), label % 6)
            return loss + self.table(label).square().mean()

    torch.manual_seed(0)
    net, x, label = Conditional(), torch.randn(4, 3, 8, 8), torch.tensor([1, 7, 0, 9])
    plan = Plan.from_json(Plan.uniform(capture(net, x, label), n=2).to_json())
    assert plan.dtypes == ("float", "int64")
    for y in outputs(plan, net, lambda model: model, x, label):
        assert y.shape == () and torch.allclose(y, net(x, label))


def test_a_graph_that_was_captured_for_other_types_is_refused_by_the_layer() -> None:
    net, x = Net().double(), torch.randn(4, 3, 8, 8)
    graph = capture(net, x.double())
    plan = Plan.uniform(graph, n=2)

    def work(comm: Communicator) -> torch.Tensor:
        return parallelize(net.float(), plan, comm=comm, graphs=lambda *_: graph)(x)

    with pytest.raises(ShardwiseError, match=r"'conv' .*float32 where .*float64 was expected"):
        World(2).run(work)


class TurnedNumber(nn.Module):
    """Dimensions of a number without any, in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.mean().permute(()).transpose(0, 0).t()


def test_a_number_has_no_dimensions_to_turn() -> None:
    module, x = TurnedNumber(), seeded_input((4, 3))
    assert_exact(module, x, [Plan.random(capture(module, x), 3, seed) for seed in range(3)])


class Noisy(nn.Module):
    """Numbers drawn like a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.Dropout2d(0.5), Noisy()])
@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
def test_random_numbers_follow_the_memory_format_of_inputs_and_weights(
    drop: nn.Module, weights: torch.memory_format
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), drop).to(memory_format=weights)
    for form in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 6, 5).to(memory_format=form)
        plan = Plan.uniform(capture(plain, x.contiguous()), h=2)
        torch.manual_seed(1)
        expected = plain(x)

        def work(comm: Communicator, x: torch.Tensor = x, plan: Plan = plan) -> torch.Tensor:
            torch.manual_seed(1)
            return parallelize(plain, plan, comm=comm)(x)

        for y in World(2).run(work):
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolutions_of_16_bits_over_narrow_blocks_are_right_on_any_cpu(kind: Any) -> None:
    torch.manual_seed(0)
    plain, x = kind(3, 4, (2, 3), stride=(1, 2)).bfloat16(), torch.randn(2, 3, 5, 7).bfloat16()
    plan = Plan.uniform(capture(plain, x), w=3)
    exact = copy.deepcopy(plain).float()(x.float())

    def work(comm: Communicator) -> torch.Tensor:
        return parallelize(plain, plan, comm=comm)(x)

    for y in World(3).run(work):
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), exact, rtol=2e-2, atol=2e-2)


class CutAndWrapped(nn.Module):
    """Circular padding that cuts off on one side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x, (-1, 2, 1, -2), mode="circular")


def test_circular_padding_wraps_what_was_not_cut_off() -> None:
    module, x = CutAndWrapped(), seeded_input((2, 3, 5, 6))
    assert_exact(module, x, [Plan.random(capture(module, x), 3, seed) for seed in range(3)])
