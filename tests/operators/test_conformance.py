"""What DistConv tests itself on, computes wrongly or refuses; each case is exact here."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

from exactness import assert_exact, seeded, seeded_input
from pool import shared_pool
from shardwise.comm import Communicator
from shardwise.geometry.grid import AXES, Config
from shardwise.model.capture import capture
from shardwise.plans.fitting import fit
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import parallelize

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SPACE = {1: "w", 2: "hw", 3: "dhw"}
SIZE = {1: 64, 2: 64, 3: 16}  # DistConv has 64^3, which takes 5 s a plan in float64
FORMAT = {2: torch.channels_last, 3: torch.channels_last_3d}

each_nd = pytest.mark.parametrize("nd", [1, 2, 3], ids="{}d".format)
each_kernel = pytest.mark.parametrize("kernel", [1, 3, 5], ids="k{}".format)


def split(*axes: str, degree: int = 2) -> Config:
    """The same degree over each of these axes; the first axis varies slowest over the ranks.

    >>> split("w", "h").ranks
    (0, 2, 1, 3)
    """
    grid = torch.arange(degree ** len(axes)).reshape([degree] * len(axes))
    order = sorted(range(len(axes)), key=lambda i: AXES.index(axes[i]))
    ranks = tuple(grid.permute(order).flatten().tolist())
    return Config(**dict.fromkeys(axes, degree), ranks=ranks)


def assert_split_exact(
    module: nn.Module, shape: tuple[int, ...], *configs: Config, world: int | None = None
) -> None:
    """The module is exact with every layer split just as each config says.

    Only an input is split otherwise where it has too few channels.
    """
    module, x = seeded(module), seeded_input(shape)
    graph = capture(module, x)
    plans = [
        Plan.make(
            graph,
            world or config.num_workers,
            lambda layer, c=config: fit(layer, c, graph.batch) if layer.op == "input" else c,
        )
        for config in configs
    ]
    assert_exact(module, x, plans, graph)


def conv_4_to_8(nd: int, kernel: Any, stride: int = 1, **options: Any) -> nn.Module:
    """DistConv's: padded by half the kernel, an even kernel by less."""
    kernel = (kernel,) * nd if isinstance(kernel, int) else kernel
    return CONV[nd](4, 8, kernel, stride, tuple((k - 1) // 2 for k in kernel), **options)


# -- its own tests -----------------------------------------------------------------------------


@each_kernel
@each_nd
def test_a_conv_split_four_ways_over_one_dimension_is_exact(nd: int, kernel: int) -> None:
    configs = [split(axis, degree=4) for axis in SPACE[nd]]
    assert_split_exact(conv_4_to_8(nd, kernel), (1, 4, *[32 if nd == 3 else 64] * nd), *configs)


@pytest.mark.deep
@each_kernel
def test_a_conv_of_64_cubed_split_four_ways_is_exact(kernel: int) -> None:
    configs = [split(axis, degree=4) for axis in SPACE[3]]
    assert_split_exact(conv_4_to_8(3, kernel), (1, 4, 64, 64, 64), *configs)


@each_kernel
@each_nd
def test_two_shards_in_each_of_two_sample_groups_are_exact(nd: int, kernel: int) -> None:
    configs = [split(*axes) for axis in SPACE[nd] for axes in (("n", axis), (axis, "n"))]
    assert_split_exact(conv_4_to_8(nd, kernel), (2, 4, *[SIZE[nd]] * nd), *configs)


@pytest.mark.parametrize("stride", [2, 4], ids="s{}".format)
@pytest.mark.parametrize("kernel", [1, 2, 3], ids="k{}".format)
@each_nd
def test_a_strided_conv_split_four_ways_is_exact(nd: int, kernel: int, stride: int) -> None:
    configs = [split(axis, degree=4) for axis in SPACE[nd]]
    assert_split_exact(conv_4_to_8(nd, kernel, stride), (1, 4, *[SIZE[nd]] * nd), *configs)


@pytest.mark.parametrize("ranks", [2, 4], ids="{}ranks".format)
@pytest.mark.parametrize("stride", [1, 2], ids="s{}".format)
@each_kernel
@each_nd
def test_circular_padding_wraps_from_the_last_shard_to_the_first(
    nd: int, kernel: int, stride: int, ranks: int
) -> None:
    conv = conv_4_to_8(nd, kernel, stride, padding_mode="circular")
    configs = [split(axis, degree=ranks) for axis in SPACE[nd]]
    assert_split_exact(conv, (1, 4, *[SIZE[nd]] * nd), *configs)


def _formats(module: nn.Module, plan: Plan, x: torch.Tensor) -> tuple[bool, ...]:
    """Whether channels_last is kept by one device, in the whole output, in this rank's part."""
    comm = Communicator()
    alone, full = module(x), parallelize(module, plan, comm=comm)(x)
    local = parallelize(module, plan, output="local", comm=comm)(x)
    torch.testing.assert_close(full, alone, rtol=1e-4, atol=1e-4)
    kept = [y.is_contiguous(memory_format=FORMAT[x.ndim - 2]) for y in (alone, full, local)]
    return kept[0], kept[1], kept[2] or local.numel() == 0


@pytest.mark.parametrize("axes", ["h", "w", "n", "f", "c", "hw", "nc", "fc"])
@pytest.mark.parametrize("nd", [2, 3], ids="{}d".format)
def test_a_channels_last_input_gives_a_channels_last_output(nd: int, axes: str) -> None:
    # In float32 and with two samples a rank: else torch itself may drop the format.
    x = seeded_input((8, 4, *[16] * nd)).float().to(memory_format=FORMAT[nd])
    for kernel in (1, 3, 5):
        module = seeded(conv_4_to_8(nd, kernel)).float().to(memory_format=FORMAT[nd])
        config = split(*axes, degree=4 // len(axes))
        plan = Plan.make(capture(module, x), 4, lambda layer, c=config: c)
        for rank, (alone, *kept) in enumerate(shared_pool(4).run(_formats, module, plan, x)):
            assert alone or (nd, kernel) == (3, 1)  # there torch on one thread drops it
            assert kept == [True, True] or not alone, f"k{kernel}, rank {rank}: {kept}"


def test_a_rank_without_samples_returns_a_channels_last_output() -> None:
    module = seeded(conv_4_to_8(2, 3)).float().to(memory_format=torch.channels_last)
    x = seeded_input((2, 4, 16, 16)).float().to(memory_format=torch.channels_last)
    plan = Plan.make(capture(module, x), 4, lambda layer: Config(n=4))
    assert shared_pool(4).run(_formats, module, plan, x) == [(True, True, True)] * 4


@pytest.mark.parametrize("stride", [1, 2, 4], ids="s{}".format)
@each_kernel
@pytest.mark.parametrize("nd", [2, 3], ids="{}d".format)
def test_two_by_two_over_any_ordered_pair_of_dimensions_is_exact(
    nd: int, kernel: int, stride: int
) -> None:
    axes = {2: "nhwfc", 3: "dhw"}[nd]
    configs = [split(*pair) for pair in permutations(axes, 2)]
    assert_split_exact(conv_4_to_8(nd, kernel, stride), (2, 4, *[SIZE[nd]] * nd), *configs)


@each_kernel
def test_two_by_two_by_two_over_depth_height_and_width_is_exact(kernel: int) -> None:
    configs = [split(*"dhw"), split(*"whd"), split(*"hdw"), split(*"nfc")]
    assert_split_exact(conv_4_to_8(3, kernel), (2, 4, 16, 16, 16), *configs)
    assert_split_exact(conv_4_to_8(3, kernel, 2), (2, 4, 16, 16, 16), *configs)


@pytest.mark.parametrize(
    "kernel", [(3, 5), (5, 3), (1, 3), (3, 1), (3, 5, 7), (1, 3, 5), (7, 3, 1)], ids=str
)
def test_a_kernel_with_unequal_sides_is_exact(kernel: tuple[int, ...]) -> None:
    nd = len(kernel)
    four = [split(axis, degree=4) for axis in SPACE[nd]]
    two_by_two = [split(*pair) for pair in permutations(SPACE[nd], 2)]
    shape = (1, 4, *[SIZE[nd]] * nd)
    assert_split_exact(conv_4_to_8(nd, kernel), shape, *four, *two_by_two)


# -- what it gets wrong ------------------------------------------------------------------------

SILENTLY_WRONG = {
    "max pool k3 s2 p1": nn.MaxPool2d(3, 2, 1),
    "batch norm": nn.BatchNorm2d(8),
    "adaptive avg pool to 1": nn.AdaptiveAvgPool2d(1),
    "adaptive avg pool to 5x3": nn.AdaptiveAvgPool2d((5, 3)),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear aligned": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "conv transpose k3 s1 p1": nn.ConvTranspose2d(8, 6, 3, 1, 1),
}


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone, 16x16", "after conv, 15x13"])
@pytest.mark.parametrize("name", SILENTLY_WRONG)
def test_what_distconv_computes_wrongly_without_a_word_is_exact(name: str, is_alone: bool) -> None:
    layer, size = SILENTLY_WRONG[name], (16, 16) if is_alone else (15, 13)
    conv = nn.Conv2d(8, 8, 3, padding=1)
    module = seeded(layer if is_alone else nn.Sequential(conv, layer, nn.Tanh()))
    x = seeded_input((2, 8, *size))
    graph = capture(module, x)
    splits = [{"h": 4}, {"w": 4}, {"h": 2, "w": 2}, {"n": 2, "h": 2}, {"f": 4}, {"h": 2}, {"w": 2}]
    plans = [Plan.uniform(graph, **degrees) for degrees in splits]
    plans += [Plan.random(graph, 4, seed) for seed in range(3)]
    assert_exact(module, x, plans, graph)


REFUSED = {
    "dilation 2": (nn.Conv2d(4, 8, 3, padding=2, dilation=2), 64),
    "dilation 2, valid": (nn.Conv2d(4, 8, 3, dilation=2), 64),
    "valid padding k3": (nn.Conv2d(4, 8, 3, padding="valid"), 64),
    "valid padding k5 s2": (nn.Conv2d(4, 8, 5, 2), 64),
    "k2 s1": (nn.Conv2d(4, 8, 2), 64),
    "k2 s1 p1": (nn.Conv2d(4, 8, 2, padding=1), 64),
    "k2 s1 same": (nn.Conv2d(4, 8, 2, padding="same"), 64),
    "k4 s2 p1": (nn.Conv2d(4, 8, 4, 2, 1), 64),
    "15 rows": (nn.Conv2d(4, 8, 3, padding=1), 15),
    "15 rows s2": (nn.Conv2d(4, 8, 3, 2, 1), 15),
    "15 rows k1": (nn.Conv2d(4, 8, 1), 15),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_distconv_refuses_is_exact(name: str) -> None:
    conv, size = REFUSED[name]
    two = [split("h"), split("w")]
    four = [split("h", degree=4), split("w", degree=4), split("h", "w"), split("n", "h")]
    assert_split_exact(conv, (2, 4, size, size), *two, *four)
