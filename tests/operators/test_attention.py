"""Attention: what each rank needs, masks that users give, and what plans make of it."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from exactness import assert_exact, seeded, seeded_input
from product_cases import Attention
from shardwise import Config, Plan, capture, plan
from shardwise.graph.layer_graph import Layer
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.layer_costs import Training
from shardwise.planner.memory import Memory


class OfInputs(nn.Module):
    """Attention of q, k and v, and perhaps a mask, that the user gives."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*inputs, **self.options)


class Padded(nn.Module):
    """Samples of several lengths: keys behind their end are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        return self.layer(x, src_key_padding_mask=is_padding)


def attention_of(*shapes: tuple[int, ...], **options: Any) -> Layer:
    return capture(OfInputs(**options), *map(torch.zeros, shapes)).layers[-1]


def needed(layer: Layer, **degrees: int) -> list[list[tuple[int, ...]]]:
    """The shapes of the parts of q, k and v, rank by rank."""
    config = Config(**degrees)
    split = Split.of(layer, config, config.num_workers)
    needs = STRATEGIES[layer.op].needs(split)
    return [[need.layout[rank].shape for need in needs] for rank in range(config.num_workers)]


Q, K, V = (2, 6, 8, 4), (2, 6, 10, 4), (2, 6, 10, 5)


def test_a_rank_needs_its_rows_and_all_keys_of_its_samples_and_heads() -> None:
    layer = attention_of(Q, K, V)
    assert layer.dims == "nch."
    assert needed(layer, n=2, f=3, h=4)[0] == [(1, 2, 2, 4), (1, 2, 10, 4), (1, 2, 10, 5)]


def test_rows_that_only_look_back_need_the_keys_up_to_the_last_of_them() -> None:
    layer = attention_of(Q, K, V, is_causal=True)
    keys = [parts[1][2] for parts in needed(layer, h=4)]
    assert keys == [2, 4, 6, 8]


def test_heads_that_share_keys_need_each_of_them_once() -> None:
    layer = attention_of(Q, (2, 2, 10, 4), (2, 2, 10, 5), enable_gqa=True)
    assert [parts[1][1] for parts in needed(layer, f=3)] == [1, 2, 1]


def test_the_parts_of_attention_do_its_work_once() -> None:
    layer = attention_of(Q, K, V)
    whole = STRATEGIES["attention"].flops(Split.of(layer, Config(), 1)).sum()
    assert whole >= 2.0 * 2 * 6 * 8 * 10 * (4 + 5)
    for config in (Config(n=2), Config(f=3), Config(h=4), Config(n=2, f=2, h=2)):
        split = Split.of(layer, config, config.num_workers)
        assert STRATEGIES["attention"].flops(split).sum() == whole


@pytest.mark.parametrize("shape", [(5, 7), (3, 1, 1, 7), (4, 5, 1), (3, 4, 5, 7)])
@pytest.mark.parametrize("is_bool", [True, False])
def test_a_mask_may_be_an_input_of_the_model(shape: tuple[int, ...], is_bool: bool) -> None:
    sizes = ((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 2))
    inputs = [seeded_input(size, seed) for seed, size in enumerate(sizes)]
    mask = seeded_input(shape, 7)
    inputs.append(mask > -0.5 if is_bool else mask)
    graph = capture(OfInputs(), *inputs)
    plans = [Plan.uniform(graph, **degrees) for degrees in ({"n": 3}, {"f": 4}, {"h": 5})]
    plans += [Plan.random(graph, world, seed=world) for world in (2, 3, 4)]
    assert_exact(OfInputs(), tuple(inputs), plans, graph)


def test_a_padding_mask_of_nn_transformer_is_exact() -> None:
    module, x = seeded(Padded()), seeded_input((3, 5, 8))
    is_padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    graph = capture(module, x, is_padding)
    plans = [Plan.random(graph, world, seed=world) for world in (2, 3, 4)]
    assert_exact(module, (x, is_padding), plans, graph)


@pytest.mark.parametrize("shape", [(1, 4, 512, 96), (1, 1, 2048, 96), (32, 4, 64, 96)], ids=str)
def test_attention_is_planned_over_all_workers(shape: tuple[int, ...]) -> None:
    found = plan(Attention(), torch.zeros(shape), cluster="4x10Gb")
    assert found.layers["scaled_dot_product_attention"].num_workers == 4


def test_what_is_dropped_counts_as_memory() -> None:
    x = torch.zeros(2, 4, 64, 24)
    stored = []
    for dropout in (0.0, 0.1):
        graph = capture(Attention(dropout_p=dropout), x)
        split = Split.of(graph.layers[-1], Config(), 1)
        stored.append(Memory(graph, Training()).of(split)[1].sum())
    scores = 2 * 4 * 64 * 64
    assert stored[1] - stored[0] == pytest.approx(scores * (2 * 4 + 1))


def test_nn_multihead_attention_stays_split_over_samples() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    graph = capture(layer, torch.zeros(4, 5, 8))
    uniform = Plan.uniform(graph, n=4)
    assert all(config == Config(n=4) for config in uniform.layers.values())


class Video(nn.Module):
    """Attention of all steps and places of a clip, each frame to itself and those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.values = nn.Conv3d(3, 8, 3, 1, 1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        frames, places = y.shape[2], y.shape[3] * y.shape[4]
        rows = y.flatten(2).transpose(1, 2)
        frame = torch.arange(frames).repeat_interleave(places)
        mask = torch.where(frame[:, None] >= frame, 0.0, -torch.inf).to(y.dtype)[None, None]
        q = rows[:, None]
        made = functional.scaled_dot_product_attention(q, q, self.values(q), attn_mask=mask)
        return y + made[:, 0].transpose(1, 2).unflatten(2, y.shape[2:]).sigmoid()


def test_no_layer_of_attention_over_a_clip_is_left_to_one_worker() -> None:
    module, x = seeded(Video()), seeded_input((1, 3, 2, 5, 3))
    graph = capture(module, x)
    rows = Plan.uniform(graph, h=4)
    large = [layer for layer in graph.layers if prod(layer.shape) > 100]
    assert {rows.layers[layer.name].num_workers for layer in large} == {4}
    plans = [rows, Plan.uniform(graph, d=2), Plan.uniform(graph, f=2)]
    plans += [Plan.random(graph, world, seed=world) for world in (2, 3, 4)]
    assert_exact(module, (x,), plans, graph)
