"""Batch norm with its ReLU: what torch's own gives, forward, backward and in its statistics."""

from __future__ import annotations

import random

import pytest
import torch

from convolutions import ISAS, SEED, chosen
from images import check_norm, fused
from shardwise.kernels import native
from shardwise.kernels.timed_layers import NativeBatchNorm

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_it_equals_float64_on_random_images(relu: bool, affine: bool, isa: str) -> None:
    rng = random.Random(f"{relu} {affine} {SEED}")
    torch.manual_seed(SEED)
    with chosen(SHARDWISE_ISA=isa):
        for _ in range(30):
            check_norm(rng, relu, affine)


def test_evaluation_and_odd_inputs_are_torch_s_own() -> None:
    stock = torch.nn.BatchNorm2d(3)
    twin = fused(stock, True)
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(twin.eval()(x), stock.eval()(x).relu())
    with pytest.raises(ValueError, match="more than 1 value"):
        twin.train()(torch.randn(1, 3, 1, 1))


def test_gradients_of_first_and_second_order_are_right() -> None:
    x, weight, bias = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 4, 5), 3, 3)
    )
    for relu in (False, True):

        def function(*t: torch.Tensor, relu: bool = relu) -> torch.Tensor:
            return NativeBatchNorm.apply(*t, (None, None, 0.0), 1e-5, relu)  # type: ignore[return-value]

        assert torch.autograd.gradcheck(function, (x, weight, bias))
        assert torch.autograd.gradgradcheck(function, (x, weight, bias))


def test_export_and_compile_see_torch_s_operators() -> None:
    net, x = torch.nn.Sequential(fused(torch.nn.BatchNorm2d(3), True)), torch.randn(2, 3, 4, 4)
    exported = torch.export.export(net, (x,))
    assert "batch_norm" in str(exported.graph) and "relu" in str(exported.graph)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))


def test_parameters_of_another_precision_are_torch_s_to_take_or_refuse() -> None:
    stock = torch.nn.BatchNorm2d(3)
    twin, x = fused(stock, False), torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    torch.testing.assert_close(twin(x), stock(x))
