"""Batch norm with its ReLU: what torch's own gives, forward, backward and in its statistics."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from shardwise.kernels import native
from shardwise.kernels.norm import BatchNorm, FusedBatchNorm2d

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def random_images(rng: random.Random) -> torch.Tensor:
    shape = (
        rng.randint(1, 5),
        rng.choice([1, 3, 16, 17, 40]),
        rng.randint(1, 20),
        rng.randint(1, 20),
    )
    dtype = rng.choice([torch.float32, torch.float64])
    x = torch.randn(shape, dtype=dtype) * rng.choice([0.1, 3]) + rng.choice([0, -2, 50])
    last = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return last if rng.random() < 0.5 else x


def fused(stock: torch.nn.BatchNorm2d, relu: bool) -> FusedBatchNorm2d:
    twin = copy.deepcopy(stock)
    twin.__class__ = FusedBatchNorm2d
    twin.relu = relu  # type: ignore[attr-defined]
    return twin  # type: ignore[return-value]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_it_equals_float64_on_random_images(relu: bool, affine: bool) -> None:
    rng, before = random.Random(int(relu) + 2 * int(affine)), torch.get_num_threads()
    torch.manual_seed(0)
    for _ in range(60):
        x = random_images(rng)
        if x.numel() == x.shape[1]:
            continue
        stock = torch.nn.BatchNorm2d(x.shape[1], affine=affine).to(x.dtype)
        if affine:
            torch.nn.init.normal_(stock.weight)
            torch.nn.init.normal_(stock.bias)
        twin, stock = fused(stock, relu), stock.double()
        torch.set_num_threads(rng.randint(1, 3))
        dy = torch.randn_like(x)
        results = []
        for module, dtype in ((twin, x.dtype), (stock, torch.float64)):
            inputs = x.detach().to(dtype).requires_grad_()
            y = module(inputs)
            y = y.relu() if relu and module is stock else y
            y.backward(dy.to(dtype))
            gradients = [p.grad for p in module.parameters()]
            buffers = [b for b in module.buffers()]
            results.append([y, inputs.grad, *gradients, *buffers])
        limit = 1e-9 if x.dtype == torch.float64 else 3e-4
        assert results[0][0].stride() == x.stride() or min(x.shape[1:]) == 1
        for ours, truth in zip(*results, strict=True):
            error = (ours.double() - truth.double()).abs().max()
            assert error <= limit * (1 + truth.abs().max()), (x.shape, x.dtype)
    torch.set_num_threads(before)


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
            return BatchNorm.apply(*t, (None, None, 0.0), 1e-5, relu)  # type: ignore[return-value]

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
