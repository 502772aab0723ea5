"""Which kernel is chosen, from what, and that the times survive on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.kernels import native, tuner
from shardwise.kernels.run import Choice
from shardwise.kernels.shape import ConvShape
from shardwise.kernels.tuner import Tuner
from shardwise.kernels.winners import Winners

SHAPE = ConvShape((2, 4, 9, 9), (8, 4, 3, 3), padding=(1, 1))

needs_library = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuner, "_tuners", {})
    return tmp_path


def with_times(**times: float) -> Tuner:
    made = Tuner()
    made.winners.seconds[SHAPE.key] = {"fwd": times}
    return made


@needs_library
def test_the_fastest_kernel_is_chosen_and_stock_where_nothing_was_timed() -> None:
    made = with_times(stock=3.0, convgemm=2.0, winograd2=1.0)
    assert made.known(SHAPE) == Choice("winograd2", "stock", "stock")


@needs_library
def test_limits_exclude_kernels() -> None:
    times = {"stock": 4.0, "convgemm": 3.0, "winograd2": 2.0, "base": 1.0}
    winners = with_times(**times).winners
    assert Tuner(None, False, winners).known(SHAPE).fwd == "base"
    assert Tuner(None, True, winners).known(SHAPE).fwd == "base"
    del winners.seconds[SHAPE.key]["fwd"]["base"]
    assert Tuner(None, False, winners).known(SHAPE).fwd == "winograd2"
    assert Tuner(None, True, winners).known(SHAPE).fwd == "convgemm"
    assert Tuner(0, False, winners).known(SHAPE).fwd == "stock"


def test_the_stock_operator_stays_unless_another_is_surely_faster() -> None:
    assert with_times(stock=1.0, convgemm=0.99).known(SHAPE).fwd == "stock"


@needs_library
def test_every_candidate_is_timed_once_and_kept_on_disk(folder: Path) -> None:
    first = Tuner()
    choice = first.tune(SHAPE)
    for direction in native.DIRECTIONS:
        timed = set(first.winners.times(SHAPE, direction))
        assert timed == set(first.candidates(SHAPE, direction)) > {"stock"}
    (path,) = folder.glob("kernels-*.json")
    written = path.read_text()
    assert json.loads(written)["threads"] == torch.get_num_threads()
    assert Tuner().tune(SHAPE) == choice
    assert path.read_text() == written  # nothing was timed again


def test_a_broken_file_is_said_and_timed_anew(folder: Path) -> None:
    path = Winners.load(1).path
    path.write_text("{")
    with pytest.warns(UserWarning, match="timed anew"):
        assert Winners.load(1).seconds == {}


@needs_library
def test_convolutions_use_what_was_timed_while_tuning() -> None:
    x, w = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3)
    expected = torch.nn.functional.conv2d(x, w, None, 1, 1)
    with tuner.tuning():
        y = tuner.convolution(x, w, None, [1, 1], [1, 1], [1, 1], 1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert tuner.tuner().winners.times(SHAPE, "fwd")
    y = tuner.convolution(x, w, None, [1, 1], [1, 1], [1, 1], 1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_convolutions_of_other_dimensions_are_the_stock_ones() -> None:
    x, w = torch.randn(2, 4, 5, 5, 5), torch.randn(8, 4, 3, 3, 3)
    with tuner.tuning():
        y = tuner.convolution(x, w, None, [1] * 3, [1] * 3, [1] * 3, 1)
    torch.testing.assert_close(y, torch.nn.functional.conv3d(x, w, None, 1, 1))
