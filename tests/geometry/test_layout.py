"""Boxes, blocks and layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.geometry.box import Box
from shardwise.geometry.grid import Config
from shardwise.geometry.layout import Layout, blocks


@st.composite
def boxes(draw, num_dims: int = 2) -> Box:
    pairs = [
        sorted(draw(st.tuples(st.integers(-3, 9), st.integers(-3, 9)))) for _ in range(num_dims)
    ]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(a, b) for a, b in zip(box.starts, box.stops, strict=True)]
    return {(i, j) for i in ranges[0] for j in ranges[1]}


@given(boxes(), boxes())
def test_the_intersection_holds_exactly_the_common_elements(a: Box, b: Box) -> None:
    assert elements(a.intersect(b)) == elements(a) & elements(b)
    assert a.contains(b) == (elements(b) <= elements(a))


@given(boxes(), boxes())
def test_slices_cut_the_box_out_of_a_tensor(inner: Box, outer: Box) -> None:
    common = inner.intersect(outer)
    if common.empty:
        return
    grid = np.stack(np.meshgrid(*map(np.arange, outer.starts, outer.stops), indexing="ij"), -1)
    found = {tuple(map(int, index)) for index in grid[common.slices_in(outer)].reshape(-1, 2)}
    assert found == elements(common)


@given(st.integers(0, 40), st.integers(1, 12))
def test_blocks_are_balanced_and_cover_everything_once(size: int, degree: int) -> None:
    parts = blocks(size, degree)
    lengths = parts[:, 1] - parts[:, 0]
    assert parts[0, 0] == 0 and parts[-1, 1] == size
    assert (parts[1:, 0] == parts[:-1, 1]).all()
    assert lengths.max() - lengths.min() <= 1


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5))
def test_blocks_of_a_product_nest_in_the_blocks_of_its_factor(size: int, a: int, b: int) -> None:
    outer, inner = blocks(size, a), blocks(size, a * b)
    for index in range(a):
        assert inner[index * b, 0] == outer[index, 0]
        assert inner[index * b + b - 1, 1] == outer[index, 1]


def test_a_layout_knows_partitions_segments_and_owners() -> None:
    halves = np.array([[0, 2], [2, 5], [0, 2], [2, 5]])
    layout = Layout.of((5,), [halves])
    assert not layout.is_partition and layout.is_segmented
    assert layout.segment(1) == (1, 3) and layout.segments == ((0, 2), (1, 3))
    assert layout.owners().is_partition
    assert not Layout.of((5,), [np.array([[0, 3], [2, 5]])]).is_segmented
    some = Layout.of((5,), [np.array([[0, 3], [3, 5], [0, 0]])])
    assert some.is_partition and some.holders.tolist() == [0, 1, -1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"n": 0}, "n=0"),
        ({"h": 2, "ranks": (0,)}, "1 ranks [0] for a split into 2 parts (h=2)"),
        ({"h": 2, "ranks": (1, 1)}, "must be different"),
    ],
)
def test_an_impossible_config_says_what_is_wrong(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match="") as error:
        Config(**arguments)
    assert sentence in str(error.value)
