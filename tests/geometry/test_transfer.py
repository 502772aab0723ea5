"""Transfers: Gather and Reduce are each other's transpose, and use collectives where they match."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pool import shared_pool
from shardwise.comm import Communicator
from shardwise.comm.exchange import carry
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout, blocks
from shardwise.geometry.transfer import Transfer

SHAPE = (7, 6)


def ranges(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs)


def rows(*pairs: tuple[int, int], shape: tuple[int, ...] = SHAPE) -> Layout:
    return Layout.of(shape, [ranges(*pairs), ranges(*[(0, shape[1])] * len(pairs))])


@st.composite
def grids(draw, world: int) -> Layout:
    """A partition of SHAPE over some of the ranks, in any order."""
    a, b = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (3, 1)]))
    ranks = draw(st.permutations(range(world)))[: a * b]
    bounds = np.zeros((world, 2, 2), dtype=np.int64)
    for index, rank in enumerate(ranks):
        bounds[rank, 0] = blocks(SHAPE[0], a)[index // b]
        bounds[rank, 1] = blocks(SHAPE[1], b)[index % b]
    return Layout(SHAPE, bounds)


@st.composite
def covers(draw, world: int) -> Layout:
    """Any boxes, overlapping, empty or reaching beyond the tensor."""
    pairs = [
        [sorted(draw(st.tuples(st.integers(-2, s + 2), st.integers(-2, s + 2)))) for s in SHAPE]
        for _ in range(world)
    ]
    return Layout.of(SHAPE, [np.array([p[dim] for p in pairs]) for dim in range(2)])


def _run(transfer: Transfer, parts: list[torch.Tensor]) -> torch.Tensor:
    comm = Communicator()
    comm.prepare(transfer.groups)
    return carry(transfer, parts[comm.rank], comm)


def move(transfer: Transfer, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return shared_pool(4).run(_run, transfer, parts)


def random_parts(layout: Layout, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [layout[rank].shape for rank in range(4)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(grids(4), covers(4), st.integers(0, 99))
def test_gather_copies_every_box_and_reduce_is_its_transpose(
    source: Layout, target: Layout, seed: int
) -> None:
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    everything = Box.whole(SHAPE)
    x = [whole[source[r].slices_in(everything)] for r in range(4)]
    gather = Transfer(source, target, fill=-1.0)
    gathered = move(gather, x)
    for rank in range(4):
        box = target[rank]
        expected = torch.full(box.shape, -1.0, dtype=torch.float64)
        inside = box.intersect(everything)
        if not inside.empty:
            expected[inside.slices_in(box)] = whole[inside.slices_in(everything)]
        assert torch.equal(gathered[rank], expected)
    y = random_parts(target, seed)
    reduced = move(gather.transpose, y)
    inside_only = move(Transfer(source, target), x)
    forward = sum(float((a * b).sum()) for a, b in zip(inside_only, y, strict=True))
    backward = sum(float((a * b).sum()) for a, b in zip(x, reduced, strict=True))
    assert abs(forward - backward) <= 1e-9 * max(1.0, abs(forward))


def test_equal_layouts_move_nothing_and_hand_out_the_same_tensor() -> None:
    layout = rows((0, 2), (2, 4), (4, 6), (6, 7))
    transfer = Transfer(layout, layout)
    assert transfer.is_identity and not transfer.messages.any()
    x = torch.zeros(2, 6)
    assert carry(transfer, x, Communicator()) is x


def test_collectives_of_the_backend_run_where_they_match() -> None:
    shape = (8, 6)
    quarter = rows((0, 2), (2, 4), (4, 6), (6, 8), shape=shape)
    whole = Layout.replicated(shape, 4)
    halo = rows((0, 3), (1, 5), (3, 7), (5, 8), shape=shape)
    columns = Layout.of(shape, [ranges(*[(0, 8)] * 4), blocks(6, 4)])
    kinds = {
        "all_gather": Transfer(quarter, whole),
        "reduce_scatter": Transfer(whole, quarter),
        "all_reduce": Transfer(whole, whole),
        "all_to_all": Transfer(quarter, columns),
        "messages": Transfer(quarter, halo),
        "identity": Transfer(quarter, quarter),
    }
    assert {k: t.route(1).kind for k, t in kinds.items()} == {k: k for k in kinds}


def test_uneven_parts_go_as_messages_and_pairs_form_their_own_groups() -> None:
    uneven = rows((0, 3), (3, 5), (5, 6), (6, 7))
    assert Transfer(uneven, Layout.replicated(SHAPE, 4)).route(0).kind == "all_to_all"
    pairs = rows((0, 2), (2, 4), (4, 6), (6, 8), shape=(8, 6))
    halves = rows((0, 4), (0, 4), (4, 8), (4, 8), shape=(8, 6))
    assert Transfer(pairs, halves).groups == ((0, 1), (2, 3))
