"""What PyTorch and PyDTNN test themselves on, and what DTensor gets wrong; exact here."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_conformance import CONV, SPACE, assert_split_exact, split
from torch import nn
from torch.nn import functional

from exactness import seeded, seeded_input
from pool import shared_pool
from shardwise.comm import Communicator
from shardwise.geometry.grid import Config
from shardwise.model.capture import capture
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import ParallelModel, parallelize

# -- PyTorch -----------------------------------------------------------------------------------


def _results(module: nn.Module, plan: Plan | None, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients of the sum of squares."""
    model = parallelize(module, plan, comm=Communicator()) if plan else copy.deepcopy(module)
    x = x.detach().requires_grad_()
    y = model(x)
    (y.square().sum() / 2).backward()
    if isinstance(model, ParallelModel):
        gradients = model.full_gradients()
    else:
        gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients}


def _errors(module: nn.Module, plan: Plan, x: torch.Tensor) -> dict[str, float]:
    """The largest errors, relative to the largest element, of results in float32."""
    found = _results(module, plan, x)
    if Communicator().rank > 0:
        return {}
    return {
        name: float((found[name] - expected).abs().max() / expected.abs().max())
        for name, expected in _results(module, None, x).items()
    }


def test_patches_of_a_wide_image_split_over_width_are_exact() -> None:
    assert_split_exact(nn.Conv2d(3, 8, 4, 4), (7, 3, 512, 1024), split("w", degree=4))


def test_a_depthwise_conv_split_over_width_is_exact() -> None:
    conv = nn.Conv2d(64, 64, 7, padding=3, groups=64)
    assert_split_exact(conv, (1, 64, 128, 256), split("w", degree=4))


@pytest.mark.deep
def test_a_depthwise_conv_of_full_size_split_over_width_is_right_in_float32() -> None:
    # Float64 takes one device 6 s a sample, in all more than a rank may wait for another.
    conv = nn.Conv2d(256, 256, 7, padding=3, groups=256)
    x = torch.randn(7, 256, 128, 256, generator=torch.Generator().manual_seed(0))
    plan = Plan.make(capture(conv, x), 4, lambda layer: Config(w=4))
    errors = shared_pool(4).run(_errors, conv, plan, x)[0]
    assert errors.keys() == {"output", "input", "weight", "bias"}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("nd", [1, 3], ids="{}d".format)
def test_more_channels_than_pixels_are_exact(nd: int) -> None:
    configs = [split(axis, degree=4) for axis in (*SPACE[nd], "f", "c")]
    conv = CONV[nd](64, 64, 3, padding=1)
    assert_split_exact(conv, (1, 64, *[8] * nd), *configs, split("f", "c"), split("w", "c"))


# -- DTensor -----------------------------------------------------------------------------------


def _output(module: nn.Module, plan: Plan, x: torch.Tensor) -> torch.Tensor:
    return parallelize(module, plan, comm=Communicator())(x).detach()


@pytest.mark.parametrize("ranks", [2, 4], ids="{}ranks".format)
@pytest.mark.parametrize("axis", ["h", "w"])
def test_every_rank_returns_the_whole_output_of_a_conv_split_over_space(
    axis: str, ranks: int
) -> None:
    """DTensor returns one rank's part and calls it replicated."""
    module, x = seeded(nn.Conv2d(4, 8, 3, padding=1)), seeded_input((1, 4, 16, 16))
    plan = Plan.make(capture(module, x), ranks, lambda layer: split(axis, degree=ranks))
    for output in shared_pool(ranks).run(_output, module, plan, x):
        torch.testing.assert_close(output, module(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [64, 57])
def test_a_resnet_stem_split_over_space_is_exact(size: int) -> None:
    """DTensor rejects its first convolution (k7 s2 p3)."""
    conv = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
    stem = nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    configs = [split("h", degree=4), split("w", degree=4), split("h", "w"), split("n", "h")]
    assert_split_exact(conv, (2, 3, size, size), *configs)
    assert_split_exact(stem, (2, 3, size, size), *configs)


# -- PyDTNN ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A convolution drawn from the ranges of PyDTNN's tests."""

    seed: int
    shape: tuple[int, int, int, int]
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: int
    dilation: int

    @classmethod
    def draw(cls, seed: int) -> Drawn:
        number = random.Random(seed).randint
        shape = (number(1, 31), number(1, 8), number(9, 20), number(9, 20))
        kernel, stride = (number(1, 5), number(1, 5)), (number(1, 5), number(1, 5))
        stride = stride if number(0, 1) else (stride[0], stride[0])
        return cls(seed, shape, number(1, 31), kernel, stride, number(0, 4), number(1, 2))

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    def __str__(self) -> str:
        x, k, s = ("x".join(map(str, sizes)) for sizes in (self.shape, self.kernel, self.stride))
        return f"{x}-f{self.filters}-k{k}-s{s}-p{self.padding}-d{self.dilation}"


def im2col(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """The convolution as one matrix product."""
    options = {"dilation": conv.dilation, "padding": conv.padding, "stride": conv.stride}
    columns = functional.unfold(x, conv.kernel_size, **options)
    return conv.weight.flatten(1) @ columns + conv.bias[:, None]


DEEP = [pytest.param(Drawn.draw(seed), marks=pytest.mark.deep) for seed in range(40, 400)]


@pytest.mark.parametrize("drawn", [*map(Drawn.draw, range(40)), *DEEP], ids=str)
def test_a_drawn_conv_equals_im2col_under_any_split(drawn: Drawn) -> None:
    conv = nn.Conv2d(drawn.shape[1], drawn.filters, drawn.kernel, **drawn.options)
    conv, x = seeded(conv), seeded_input(drawn.shape)
    alone = conv(x).detach()
    torch.testing.assert_close(im2col(conv, x).view_as(alone), alone, rtol=1e-12, atol=1e-12)
    degrees = {"n": 4, "h": alone.shape[2], "w": alone.shape[3], "f": drawn.filters}
    degrees["c"] = drawn.shape[1]
    configs = [Config(**{axis: min(4, most)}) for axis, most in degrees.items()]
    assert_split_exact(conv, drawn.shape, *configs, world=4)


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        pytest.param(nn.Conv2d(3, 96, 11, 4), 227, id="conv1"),
        pytest.param(nn.Conv2d(96, 256, 5, padding=2), 27, id="conv2"),
        pytest.param(nn.Conv2d(256, 384, 3, padding=1), 13, id="conv3"),
        pytest.param(nn.Conv2d(384, 384, 3, padding=1), 13, id="conv4"),
        pytest.param(nn.Conv2d(384, 256, 3, padding=1), 13, id="conv5"),
    ],
)
def test_a_layer_of_alexnet_is_exact(conv: nn.Conv2d, size: int) -> None:
    configs = [split("h", degree=4), split("f", degree=4), split("f", "c"), split("h", "w")]
    assert_split_exact(conv, (1, conv.in_channels, size, size), *configs)
