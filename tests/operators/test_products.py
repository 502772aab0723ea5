"""Products: what each rank needs, which letters axes split, and what is left to one worker."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from product_cases import ATTENTION, NORMS, PRODUCTS
from shardwise import Config, Plan, capture, parallelize, plan
from shardwise.comm.in_process import InProcess, World
from shardwise.graph.layer_graph import Layer
from shardwise.operators import STRATEGIES, Split
from shardwise.operators.notation import Notation, einsum_notation
from shardwise.operators.strategy import READERS


class Call(nn.Module):
    def __init__(self, function: Any, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(shape)) for shape in shapes)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs, *self.weights)


def product_of(function: Any, shape: tuple[int, ...], *weights: tuple[int, ...]) -> Layer:
    return capture(Call(function, *weights), torch.zeros(shape)).layers[-1]


def needed(layer: Layer, **degrees: int) -> list[list[tuple[int, ...]]]:
    """The shapes of the operands' parts, rank by rank."""
    config = Config(**degrees)
    split = Split.of(layer, config, config.num_workers)
    STRATEGIES[layer.op].check(layer, config, config.num_workers)
    needs = STRATEGIES[layer.op].needs(split)
    return [[need.layout[rank].shape for need in needs] for rank in range(config.num_workers)]


def test_equations_are_read_as_torch_reads_them() -> None:
    assert einsum_notation("bij,bjk", [(2, 3, 4), (2, 4, 5)]) == Notation(("bij", "bjk"), "ik")
    assert einsum_notation("Ab, aB", [(1, 2), (3, 4)]) == Notation(("Ab", "aB"), "ABab")
    assert einsum_notation("...i,...i->...", [(5, 2), (4, 5, 2)]) == Notation(("1i", "01i"), "01")
    assert einsum_notation("bii->bi", [(2, 3, 3)]) is None


def test_rows_columns_and_the_inner_dimension_of_a_product_are_split() -> None:
    layer = product_of(lambda x, w: x @ w, (4, 6, 8), (8, 10))
    assert layer.dims == "ncw"  # as the input, whose last dimension is space
    assert needed(layer, n=2)[0] == [(2, 6, 8), (8, 10)]
    assert needed(layer, f=2)[0] == [(4, 3, 8), (8, 10)]
    assert needed(layer, w=2)[0] == [(4, 6, 8), (8, 5)]
    assert needed(layer, c=4)[0] == [(4, 6, 2), (2, 10)]


def test_what_a_product_sums_over_stays_split_over_space() -> None:
    layer = product_of(lambda x: torch.einsum("bchw,bdhw->bcd", x, x), (2, 4, 6, 8))
    assert needed(layer, h=3, w=2) == [[(2, 4, 2, 4)] * 2] * 6
    strategy, split = STRATEGIES["product"], Split.of(layer, Config(h=3, w=2), 6)
    assert strategy.output(split).is_partition
    assert strategy.partial(split) is not None


def test_only_one_of_the_ranks_that_share_a_sum_adds_what_is_added_to_it() -> None:
    layer = product_of(lambda x, w, b: torch.addmm(b, x, w), (4, 6), (6, 8), (8,))
    assert [parts[0] for parts in needed(layer, c=2, f=2)] == [(4,), (0,), (4,), (0,)]


@pytest.mark.parametrize("degrees", [{"n": 2}, {"f": 3}, {"c": 4}, {"n": 2, "f": 2, "c": 2}])
def test_the_parts_of_a_product_do_its_work_once(degrees: dict[str, int]) -> None:
    layer = product_of(lambda x, w: x @ w, (4, 8), (8, 6))
    config = Config(**degrees)
    split = Split.of(layer, config, config.num_workers)
    assert STRATEGIES["product"].flops(split).sum() == 2.0 * 4 * 8 * 6


def test_a_diagonal_and_one_number_are_taken_apart() -> None:
    for function, shape in (
        (lambda x: torch.einsum("bii->bi", x), (2, 3, 3)),
        (lambda x: x[0] @ x[1], (2, 3)),
    ):
        graph = capture(Call(function), torch.zeros(shape))
        assert all(STRATEGIES[layer.op].known for layer in graph.layers)


def test_heads_that_have_no_label_are_split_as_channels() -> None:
    graph = capture(PRODUCTS["self-attention"][0], torch.zeros(3, 7, 12).double())
    dims = [layer.dims for layer in graph.layers if layer.op == "product"]
    assert dims == ["ncw.", "ncw."]


@pytest.mark.parametrize("name", [*PRODUCTS, *ATTENTION, *NORMS])
def test_every_product_is_planned_and_known(name: str) -> None:
    module, shape = (PRODUCTS | ATTENTION | NORMS)[name]
    module, x = module.double(), torch.zeros(shape).double()
    found, graph = plan(module, x, cluster="4x1Gb"), capture(module, x)
    whole = {graph[name].traits.called for name in found.whole}
    assert whole.isdisjoint(set(READERS) - {"einsum"})  # which has a diagonal


def test_products_of_large_images_are_planned_over_several_workers() -> None:
    module = PRODUCTS["self-attention"][0].float()
    found = plan(module, torch.zeros(1, 4096, 12), cluster="4x10Gb")
    assert found.layers["matmul"].num_workers == found.layers["matmul_1"].num_workers == 4


EVERY = PRODUCTS | ATTENTION | NORMS


def assert_close(found: Any, alone: Any) -> None:
    """But for the digits that 16 bits have."""
    for y, expected in zip(tree_leaves(found), tree_leaves(alone), strict=True):
        assert y.dtype == expected.dtype
        limit = 0.05 * float(expected.detach().abs().max())
        torch.testing.assert_close(y, expected, rtol=0.05, atol=limit)


def small(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """A module with small weights, so that sums do not cancel."""
    module, shape = EVERY[name]
    module, generator = copy.deepcopy(module).to(dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.1, 0.4, generator=generator)
    return module, torch.rand(shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    "name", sorted(EVERY.keys() - {"local response norm"})
)  # of which torch has none
def test_products_of_16_bits_are_those_of_one_device(name: str) -> None:
    module, x = small(name, torch.bfloat16)
    graph = capture(module, x)

    def work(comm: InProcess, one: Plan) -> Any:
        torch.manual_seed(0)
        return parallelize(module, one, comm=comm, graphs=lambda *_: graph)(x)

    torch.manual_seed(0)
    alone = module(x)
    for seed in range(3):
        for found in World(3).run(work, Plan.random(graph, 3, seed)):
            assert_close(found, alone)


@pytest.mark.parametrize("name", ["self-attention", "attention with dropout", "RMS norm"])
def test_products_under_autocast_are_those_of_one_device(name: str) -> None:
    module, x = small(name, torch.float32)
    plan = Plan.random(capture(module, x), 2, seed=1)

    def work(comm: InProcess | None) -> Any:
        torch.manual_seed(0)
        model = module if comm is None else parallelize(module, plan, comm=comm)
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for found in World(2).run(work):
        assert_close(found, work(None))
