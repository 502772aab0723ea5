"""Batch norm and max pooling on random images, against torch; what is not written is NaN."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from shardwise.kernels.timed_layers import FastMaxPool2d, FusedBatchNorm2d

LIMITS = {torch.float32: 3e-4, torch.float64: 1e-9}


@contextmanager
def poisoned(threads: int) -> Iterator[None]:
    """Inside, new tensors are full of NaN (or the largest integer), and so many threads run."""
    before, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(before)


def random_images(rng: random.Random, last: bool) -> torch.Tensor:
    sizes = (rng.randint(1, 5), rng.choice([1, 2, 3, 16, 17, 40, 70, 129]))
    shape = (*sizes, rng.randint(1, 20), rng.randint(1, 20))
    dtype = rng.choice([torch.float32, torch.float64])
    x = torch.randn(shape, dtype=dtype) * rng.choice([0.1, 3]) + rng.choice([0, -2, 50])
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if last else x


def fused(stock: torch.nn.BatchNorm2d, relu: bool) -> FusedBatchNorm2d:
    twin = copy.deepcopy(stock)
    twin.__class__ = FusedBatchNorm2d
    twin.relu = relu  # type: ignore[attr-defined]
    return twin  # type: ignore[return-value]


def check_norm(rng: random.Random, relu: bool, affine: bool) -> None:
    """Outputs, gradients and statistics are those of float64, or as near as torch's."""
    x = random_images(rng, rng.random() < 0.5)
    if x.numel() == x.shape[1]:
        return
    stock = torch.nn.BatchNorm2d(x.shape[1], affine=affine).to(x.dtype)
    if affine:
        torch.nn.init.normal_(stock.weight)
        torch.nn.init.normal_(stock.bias)
    twin, rough, stock = fused(stock, relu), copy.deepcopy(stock), stock.double()
    dy, results = torch.randn_like(x), []
    if relu:  # rounding decides on which side of 0 a number lies: there, no error comes back
        y = functional.batch_norm(x.double(), None, None, stock.weight, stock.bias, training=True)
        dy[y.abs() < 1e-3] = 0
    for module, dtype in ((twin, x.dtype), (stock, torch.float64), (rough, x.dtype)):
        inputs = x.detach().to(dtype).requires_grad_()
        with poisoned(rng.randint(1, 3)):
            y = module(inputs)
            y = y.relu() if relu and module is not twin else y
            y.backward(dy.to(dtype))
        gradients = [p.grad for p in module.parameters()]
        results.append([y, inputs.grad, *gradients, *module.buffers()])
    assert results[0][0].stride() == x.stride() or min(x.shape[1:]) == 1
    for ours, truth, torchs in zip(*results, strict=True):
        error, its = ((y.double() - truth.double()).abs().max() for y in (ours, torchs))
        limit = LIMITS[x.dtype] * (1 + truth.abs().max())  # or torch's own error, far from nought
        assert error <= max(limit, 2 * its), (x.shape, x.dtype, affine, relu)


def random_pooling(rng: random.Random) -> dict:
    kernel = (rng.randint(1, 5), rng.randint(1, 5))
    return {
        "kernel_size": kernel,
        "stride": (rng.randint(1, 3), rng.randint(1, 3)),
        "padding": (rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2)),
        "ceil_mode": rng.random() < 0.5,
    }


def compare_pools(x: torch.Tensor, how: dict, threads: int = 1) -> None:
    """The same numbers, NaNs included, and the gradients at the same places."""
    with poisoned(threads):
        ours, stock = FastMaxPool2d(**how)(x), torch.nn.MaxPool2d(**how)(x)
        torch.testing.assert_close(ours, stock, rtol=0, atol=0, equal_nan=True)
        dy = torch.randn_like(stock)
        ours, stock = (torch.autograd.grad(y, x, dy)[0] for y in (ours, stock))
    torch.testing.assert_close(ours, stock, msg=lambda text: f"{how}: {text}")


def check_pool(rng: random.Random) -> None:
    while True:
        how, x = random_pooling(rng), random_images(rng, last=True)
        sizes = zip(x.shape[2:], how["padding"], how["kernel_size"], strict=True)
        if all(n + 2 * p >= k for n, p, k in sizes):
            return compare_pools(x.requires_grad_(), how, rng.randint(1, 3))
