"""Augmentation: the same for all ranks of a sample, in any box, and as plain code would do it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles import random_box
from shardwise.data import Augment, Loader, Synthetic, flips
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box


def plainly(image: np.ndarray, augment: Augment, start: list[int], mirrored: list[bool]) -> Any:
    """The obvious way: pad all, cut the window, mirror it."""
    pad = augment.padding
    padded = np.pad(image, [(0, 0)] + [(pad, pad)] * (image.ndim - 1))
    size = augment.out_shape(image.shape)[1:]
    window = [slice(s + pad, s + pad + n) for s, n in zip(start, size, strict=True)]
    dims = tuple(dim + 1 for dim, flipped in enumerate(mirrored) if flipped)
    return np.flip(padded[(slice(None), *window)], dims)


@settings(deadline=None, max_examples=150)
@given(
    space=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    smaller=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_any_box_of_an_augmented_sample_is_that_of_plain_code(
    space: list[int], padding: int, smaller: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (2, *space)
    image = rng.integers(1, 100, shape)
    size = tuple(max(1, length + 2 * padding - smaller) for length in space)
    augment = Augment(tuple(rng.random(len(space)) < 0.7), size, padding)
    augment.check(shape)
    views = augment.views(shape, 4, augment.chances(4, seed, 0))
    for number in range(4):
        starts, mirrored = views.starts[number].tolist(), views.mirrored[number].tolist()
        whole = plainly(image, augment, starts[1:], mirrored[1:])
        box = random_box(whole.shape, rng)
        out = np.zeros(box.shape, int)
        look = list(views.looks(box))[number]
        if look is not None:
            assert look.box.numel <= box.numel  # no more is read than is wanted
            look.put(image[look.box.slices_in(Box.whole(shape))], out)
        np.testing.assert_array_equal(out, whole[box.slices_in(Box.whole(whole.shape))])


def parts(source: Any, augment: Augment, boxes: list[Box]) -> list[Any]:
    """The first batch, as ranks with these boxes of a sample read it."""
    found = []
    for box in boxes:

        def batch_box(num: int, box: Box = box) -> Box:
            return Box((0, *box.starts), (num, *box.stops))

        def label_box(num: int, box: Box = box) -> Box:
            return Box((0, *box.starts[1:]), (num, *box.stops[1:]))

        volumes = {"label_box": label_box} if source.label_shape else {}
        loader = Loader(source, 8, box=batch_box, augment=augment, seed=5, **volumes)
        found.append(next(iter(loader)))
    return found


@pytest.mark.parametrize("volumes", [False, True])
def test_parts_of_a_2x2_split_with_halo_make_up_the_whole(volumes: bool) -> None:
    source = Synthetic(20, (3, 23, 31), 4, volumes)
    augment = Augment((True, True), (20, 28), 4, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    halo, size = 2, (20, 28)
    whole = parts(source, augment, [Box.whole((3, *size))])[0]
    boxes = []
    for rows in ((0, 9), (9, 20)):
        for columns in ((0, 14), (14, 28)):
            starts = (0, max(0, rows[0] - halo), max(0, columns[0] - halo))
            stops = (3, min(20, rows[1] + halo), min(28, columns[1] + halo))
            boxes.append(Box(starts, stops))
    for box, part in zip(boxes, parts(source, augment, boxes), strict=True):
        assert part.indices == whole.indices
        _, rows, columns = map(slice, box.starts, box.stops)
        assert np.array_equal(part.x, whole.x[:, :, rows, columns])
        wanted = whole.y[:, rows, columns] if volumes else whole.y
        assert np.array_equal(part.y, wanted)
    if volumes:
        assert (whole.y == -100).any()  # where a window reaches over the border


def test_channels_are_normalised_by_their_own_numbers_in_a_split_of_channels() -> None:
    source = Synthetic(8, (3, 6, 6))
    augment = Augment(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    whole, last = parts(source, augment, [Box.whole((3, 6, 6)), Box((2, 0, 0), (3, 6, 6))])
    assert np.array_equal(last.x, whole.x[:, 2:])
    image = source.read(whole.indices[0]).astype(np.float64) / 255
    wanted = (image - np.array([0.4, 0.5, 0.6])[:, None, None]) / np.array([0.2, 0.3, 0.4])[
        :, None, None
    ]
    np.testing.assert_allclose(whole.x[0], wanted, atol=1e-5)


def test_chances_are_fair_and_belong_to_the_sample_and_epoch() -> None:
    augment = Augment((True, True), None, 4)
    bits = augment.chances(4000, 0, 0)
    assert bits is not None
    views = augment.views((3, 32, 32), 4000, bits)
    assert abs(views.mirrored[:, 1:].mean(axis=0) - 0.5).max() < 0.03
    for dim in (1, 2):
        places = np.bincount(views.starts[:, dim] + 4, minlength=9)
        assert len(places) == 9 and places.min() > 360 and places.max() < 530
    both = views.mirrored[:, 1] & views.mirrored[:, 2]
    assert abs(both.mean() - 0.25) < 0.03
    other = augment.views((3, 32, 32), 4000, augment.chances(4000, 0, 1))
    assert (other.starts != views.starts).any()


def test_evaluation_takes_the_middle() -> None:
    augment = Augment((True, True), (4, 4), 2).for_evaluation()
    views = augment.views((1, 8, 10), 3, augment.chances(3, 0, 0))
    assert views.starts.tolist() == [[0, 2, 3]] * 3 and not views.mirrored.any()


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        (Augment(flip=(True,)), "flip has 1 dims"),
        (Augment(size=(9, 4)), "size="),
        (Augment(size=(4,)), "size="),
        (Augment(padding=-1), "padding=-1"),
        (Augment(mean=(0.5,)), "mean must have 3 numbers"),
        (Augment(std=(1.0, 0.0, 1.0)), "std="),
    ],
)
def test_an_augmentation_that_does_not_fit_says_why(augment: Augment, words: str) -> None:
    with pytest.raises(ShardwiseError, match=words):
        augment.check((3, 8, 8))


def test_flips_are_named_by_letters() -> None:
    assert flips("hw", 2) == (True, True) and flips("w", 3) == (False, False, True)
    with pytest.raises(ShardwiseError, match="flip='d' must be made of h, w"):
        flips("d", 2)
