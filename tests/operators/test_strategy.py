"""What strategies say of operators: legal splits, layouts, weight blocks, flops and bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from operator_cases import OPERATORS
from shardwise import Config, Plan, capture, parallelize
from shardwise.comm.in_process import World
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators import (
    STRATEGIES,
    Call,
    Local,
    Need,
    Request,
    Split,
    Strategy,
    operator,
)
from shardwise.operators.norm_over_ranks import NormalizeChannels
from shardwise.operators.strategy import READERS


def layer_of(module: nn.Module, *shape: int) -> Layer:
    return capture(module, torch.zeros(shape)).layers[-1]


def described(layer: Layer, **degrees: int):
    config = Config(**degrees)
    strategy, split = STRATEGIES[layer.op], Split.of(layer, config, config.num_workers)
    strategy.check(layer, config, config.num_workers)
    return strategy, split


@pytest.mark.parametrize("name", OPERATORS)
def test_outputs_are_partitions_and_reduced_parts_cover_them(name: str) -> None:
    module, shape = OPERATORS[name]
    graph = capture(module.double(), torch.zeros(shape, dtype=torch.float64))
    for world in (2, 5, 8):
        for seed in range(4):
            plan = Plan.random(graph, world, seed)
            for layer in graph.layers:
                strategy = STRATEGIES[layer.op]
                split = Split.of(layer, plan.layers[layer.name], world)
                assert strategy.output(split).is_partition, (layer, plan.layers[layer.name])
                assert len(strategy.needs(split)) == len(layer.operands)
                assert (strategy.flops(split) >= 0).all() and (strategy.bytes(split) >= 0).all()


def test_stationary_x_y_and_w_hold_the_weight_blocks_of_the_paper() -> None:
    layer = layer_of(nn.Conv2d(8, 12, 3), 2, 8, 6, 6)
    for degrees, block in (({"c": 4}, (12, 2)), ({"f": 4}, (3, 8)), ({"c": 2, "f": 2}, (6, 4))):
        strategy, split = described(layer, **degrees)
        x, weight, bias = (need.layout for need in strategy.needs(split))
        assert {weight[rank].shape for rank in range(4)} == {(*block, 3, 3)}
        assert {x[rank].shape[1] for rank in range(4)} == {block[1]}
        assert weight.owners().is_partition and bias.owners().is_partition
        assert (strategy.partial(split) is not None) == ("c" in degrees)


def test_the_parts_of_a_convolution_do_its_work_once() -> None:
    layer = layer_of(nn.Conv2d(8, 12, 3, padding=1), 4, 8, 6, 6)
    expected = 2.0 * 4 * 12 * 6 * 6 * 8 * 9
    for degrees in ({"n": 4}, {"h": 2, "w": 2}, {"c": 4}, {"f": 3}, {"c": 2, "f": 2}, {"n": 1}):
        strategy, split = described(layer, **degrees)
        assert strategy.flops(split).sum() == expected
    linear = layer_of(nn.Linear(10, 6), 8, 10)
    for degrees in ({"n": 4}, {"c": 5}, {"f": 3}, {"c": 2, "f": 2}):
        strategy, split = described(linear, **degrees)
        assert strategy.flops(split).sum() == 2.0 * 8 * 10 * 6


def test_bytes_count_what_is_read_and_written() -> None:
    layer = layer_of(nn.Linear(10, 6), 8, 10)
    strategy, split = described(layer, n=2)
    assert strategy.bytes(split, itemsize=4).tolist() == [4 * (4 * 10 + 60 + 6 + 4 * 6)] * 2


def test_norms_sum_two_numbers_per_group_only_where_a_group_spans_ranks() -> None:
    batch_norm = layer_of(nn.BatchNorm2d(6), 4, 6, 5, 5)
    strategy, split = described(batch_norm, n=2)
    assert strategy.sums(split) == Layout.of((2, 1, 6), [np.array([[0, s]] * 2) for s in (2, 1, 6)])
    strategy, split = described(batch_norm, f=3)
    assert strategy.sums(split) is None
    group_norm = layer_of(nn.GroupNorm(3, 6), 4, 6, 5, 5)
    strategy, split = described(group_norm, f=2)  # a group lies on both ranks
    sums = strategy.sums(split)
    assert sums is not None and not sums.is_segmented


def test_every_operator_of_the_graph_has_a_strategy() -> None:
    graphs = [capture(m.double(), torch.zeros(s).double()) for m, s in OPERATORS.values()]
    assert {layer.op for graph in graphs for layer in graph.layers} == set(STRATEGIES) - {"stored"}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 7), (3, 4, 5, 6), (2, 3, 4, 3, 2)])
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_batch_norm_of_one_rank_is_torch_s(
    dtype: torch.dtype, limit: float, shape: tuple[int, ...], weighted: bool
) -> None:
    torch.manual_seed(0)
    x = (2 * torch.randn(shape, dtype=dtype) + 3).requires_grad_()
    params = [torch.randn(shape[1], dtype=dtype, requires_grad=True) for _ in range(2 * weighted)]
    weight, bias = params or (None, None)
    expected = torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
    count = x.numel() // shape[1]
    y, mean, var = NormalizeChannels.apply(x, weight, bias, count, 1e-5, lambda sums: sums)
    gradient = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, [x, *params], gradient)
    found = torch.autograd.grad(y, [x, *params], gradient)
    dims = [dim for dim in range(x.ndim) if dim != 1]
    exact = torch.var_mean(x.double(), dims, correction=0)
    for got, right in zip((y, *found, var, mean), (expected, *wanted, *exact), strict=True):
        torch.testing.assert_close(got, right.to(got.dtype), rtol=limit, atol=limit)


@pytest.mark.parametrize("name", ["batch", "instance", "group", "layer"])
def test_norms_over_ranks_keep_the_digits_of_values_far_from_nought(name: str) -> None:
    norms = {
        "batch": nn.BatchNorm2d(4, eps=1e-12),
        "instance": nn.InstanceNorm2d(4, eps=1e-12),
        "group": nn.GroupNorm(2, 4, eps=1e-12),
        "layer": nn.LayerNorm((6, 5), eps=1e-12),
    }
    model = norms[name].double()
    torch.manual_seed(0)
    x = 1.0 + 1e-5 * torch.randn(3, 4, 6, 5, dtype=torch.float64)
    plan = Plan.uniform(capture(model, x), h=2)
    found = World(2).run(lambda comm: parallelize(model, plan, comm=comm)(x))
    expected = model(x)
    for y in found:  # squares of whole values would leave six digits
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


class Forgetful(Strategy):
    """Says how it is computed, and nothing else."""

    def needs(self, split: Split) -> tuple[Need, ...]:
        return ()

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]


class Careful(Forgetful):
    keeps_inputs, draws = False, False

    def read(self, call: Call) -> Request:
        return Request("careful", (call.x,), {"p": call.get("probability")})


@pytest.mark.parametrize(
    "cls, aten, sentence",
    [
        (Forgetful, (), "operator 'x' .* does not say: keeps_inputs, draws"),
        (Forgetful, ("flip",), "does not say: .*, read"),
        (Careful, ("rand",), "operator 'x': rand draws random numbers"),
        (Careful, ("flipp",), "there is no ATen operator 'flipp'"),
    ],
)
def test_an_operator_that_forgets_something_is_an_error_when_it_is_made(
    cls: type[Strategy], aten: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        operator("x", *aten)(cls)
    assert "x" not in STRATEGIES


def test_a_mistake_in_reading_arguments_is_an_error_and_not_an_unknown_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(READERS, "flip", Careful())

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flip(1)

    with pytest.raises(TypeError, match="no overload of flip has an argument 'probability'"):
        capture(Net(), torch.zeros(2, 3))


def test_attributes_of_an_operator_are_a_dataclass() -> None:
    with pytest.raises(TypeError, match="attributes of operator 'flip' are a dataclass"):
        Request("flip", (), {"dims": (1,)})
