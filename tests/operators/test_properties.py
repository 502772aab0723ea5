"""Random operators, shapes, strides, paddings, grids and worlds: all equal one device.

An example is one module with several random plans, each of which counts as a case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from random_cases import check, deep, quick

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


@st.composite
def convolutions(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    num_dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    channels = groups * draw(st.integers(1, 4))
    filters = groups * draw(st.integers(1, 5))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(num_dims))
    stride = tuple(draw(st.integers(1, 4)) for _ in range(num_dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(num_dims))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(num_dims))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    space = tuple(
        draw(st.integers(max(d * (k - 1) + 1, 4), 13))
        for d, k in zip(dilation, kernel, strict=True)
    )
    bias = draw(st.booleans())
    module = CONVS[num_dims](
        channels, filters, kernel, stride, padding, dilation, groups, bias, mode
    )
    return module, (draw(st.integers(1, 5)), channels, *space)


@st.composite
def transposed_convolutions(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    num_dims = draw(st.sampled_from([1, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2]))
    channels, filters = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 4))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(num_dims))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(num_dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(num_dims))
    padding = tuple(draw(st.integers(0, (k - 1) // 2)) for k in kernel)
    extra = tuple(
        draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
    )
    module = TRANSPOSED[num_dims](
        channels, filters, kernel, stride, padding, extra, groups, draw(st.booleans()), dilation
    )
    space = tuple(draw(st.integers(2, 6)) for _ in range(num_dims))
    return module, (draw(st.integers(1, 4)), channels, *space)


@st.composite
def poolings(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    num_dims = draw(st.sampled_from([1, 2, 2, 3]))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(num_dims))
    stride = tuple(draw(st.integers(1, 4)) for _ in range(num_dims))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    ceil_mode = draw(st.booleans())
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    shape += tuple(draw(st.integers(7, 13)) for _ in range(num_dims))
    kind = draw(st.sampled_from(["max", "avg", "adaptive avg", "adaptive max"]))
    if kind == "max":
        dilation = draw(st.integers(1, 2))
        return MAX_POOLS[num_dims](kernel, stride, padding, dilation, ceil_mode=ceil_mode), shape
    if kind == "avg":
        counts = draw(st.booleans())
        return AVG_POOLS[num_dims](kernel, stride, padding, ceil_mode, counts), shape
    outputs = tuple(draw(st.integers(1, 6)) for _ in range(num_dims))
    name = f"Adaptive{kind.split()[1].title()}Pool{num_dims}d"
    return getattr(nn, name)(outputs), shape


@st.composite
def norms(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    num_dims = draw(st.sampled_from([1, 2, 2, 3]))
    groups = draw(st.integers(1, 4))
    channels = groups * draw(st.integers(1, 4))
    shape = (draw(st.integers(2, 5)), channels, *(draw(st.integers(3, 7)) for _ in range(num_dims)))
    affine = draw(st.booleans())
    last = draw(st.integers(1, num_dims))
    module = draw(
        st.sampled_from(
            [
                BATCH_NORMS[num_dims](channels, affine=affine),
                INSTANCE_NORMS[num_dims](channels, affine=affine),
                nn.GroupNorm(groups, channels, affine=affine),
                nn.LayerNorm(shape[-last:], elementwise_affine=affine),
            ]
        )
    )
    return module, shape


class Mix(nn.Module):
    """A chain of operators that only move, merge or scale elements."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            if step == "cat":
                x = torch.cat([x, x.tanh() * self.scale], 1)
            elif step == "chunk":
                a, *rest = x.chunk(2, 1)
                x = a + rest[0][:, : a.shape[1]].mean() if rest else a * 2
            elif step == "slice":
                x = x[:, :, ::2, 1:]
            elif step == "pad":
                x = nn.functional.pad(x, (1, 0, 2, 1), value=0.5)
            elif step == "up":
                x = nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear")
            elif step == "nearest":
                x = nn.functional.interpolate(x, scale_factor=2)
            elif step == "softmax":
                x = x.softmax(1)
            elif step == "swap":
                x = x.permute(0, 2, 3, 1).reshape(x.shape[0], x.shape[1], x.shape[2], x.shape[3])
            elif step == "squeeze":
                x = x * x.mean((2, 3), keepdim=True).sigmoid()
        return x


@st.composite
def mixes(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    steps = ["cat", "chunk", "slice", "pad", "up", "nearest", "softmax", "swap", "squeeze"]
    chosen = draw(st.lists(st.sampled_from(steps), min_size=1, max_size=4, unique=True))
    shape = (draw(st.integers(1, 4)), draw(st.integers(2, 6)))
    return Mix(chosen), (*shape, draw(st.integers(4, 9)), draw(st.integers(4, 9)))


@st.composite
def networks(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """A small CNN: convolutions, norms, pooling, a flatten and a linear layer."""
    width, size = draw(st.integers(2, 6)), draw(st.integers(7, 12))
    filters = draw(st.integers(2, 6))
    norm = draw(st.sampled_from([nn.BatchNorm2d(width), nn.GroupNorm(1, width), nn.Identity()]))
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, draw(st.integers(1, 2)), 1), norm, nn.ReLU()]
    layers += [nn.MaxPool2d(2, 2, ceil_mode=draw(st.booleans()))] if draw(st.booleans()) else []
    layers += [nn.Conv2d(width, filters, draw(st.sampled_from([1, 3])), 1, 1), nn.ELU()]
    outputs = draw(st.sampled_from([1, 2, 3]))
    layers += [nn.AdaptiveAvgPool2d(outputs), nn.Flatten(), nn.Dropout(0.2)]
    layers += [nn.Linear(filters * outputs * outputs, 7)]
    return nn.Sequential(*layers), (draw(st.integers(2, 5)), 3, size, size + 1)


ALL = {
    "convolution": convolutions(),
    "transposed convolution": transposed_convolutions(),
    "pooling": poolings(),
    "norm": norms(),
    "mix of movements": mixes(),
    "small network": networks(),
}


@pytest.mark.parametrize("kind", ALL)
def test_a_random_module_under_random_plans_equals_one_device(kind: str) -> None:
    given(ALL[kind], st.integers(0, 10_000))(quick(lambda case, seed: check(*case, seed)))()


@pytest.mark.deep
@pytest.mark.parametrize("kind", ALL)
def test_many_more_random_modules_equal_one_device(kind: str) -> None:
    given(ALL[kind], st.integers(0, 10_000))(deep(lambda case, seed: check(*case, seed)))()
