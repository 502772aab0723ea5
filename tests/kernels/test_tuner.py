"""Which kernel is chosen, from what, and that the times survive on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.kernels import checks, dispatch, native, tuner
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import KernelChoice, kernels_for
from shardwise.kernels.ops import STOCK_OF
from shardwise.kernels.tuner import Tuner, Winners

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
    assert made.known(SHAPE) == KernelChoice("winograd2", "stock", "stock")


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


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"format": "shardwise-kernels-1"}',
        '{"format": "shardwise-kernels-1", "seconds": []}',
        '{"format": "shardwise-kernels-1", "seconds": {"shape": 1}}',
        '{"format": "shardwise-kernels-1", "seconds": {"shape": {"fwd": {"base": "fast"}}}}',
        '{"format": "shardwise-kernels-1", "seconds": {"shape": {"fwd": {"base": NaN}}}}',
    ],
)
def test_a_broken_file_is_said_and_timed_anew(folder: Path, text: str) -> None:
    Winners.load(1).path.write_text(text)
    with pytest.warns(UserWarning, match="timed anew"):
        assert Winners.load(1).seconds == {}


def test_times_that_others_kept_meanwhile_stay() -> None:
    one, two = Winners.load(1), Winners.load(1)
    one.seconds = {"a": {"fwd": {"base": 1.0}}}
    two.seconds = {"a": {"fwd": {"stock": 2.0}, "dx": {"stock": 3.0}}}
    one.save()
    two.save()
    together = {"a": {"fwd": {"base": 1.0, "stock": 2.0}, "dx": {"stock": 3.0}}}
    assert Winners.load(1).seconds == together


@needs_library
def test_where_nothing_can_be_written_kernels_are_timed_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("SHARDWISE_CACHE", str(folder / "file" / "inside"))
    with pytest.warns(UserWarning, match="times of kernels cannot be kept in"):
        made = Tuner()
        made.tune(SHAPE, ["fwd"])
    assert made.winners.times(SHAPE, "fwd")


@needs_library
@pytest.mark.parametrize("spoil", [lambda dw: dw + 0.1, lambda dw: dw * float("nan")])
def test_a_stock_kernel_that_is_wrong_here_is_said_and_not_chosen(
    spoil: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = right(*arguments)
        return dx, spoil(dw) if dw is not None else dw

    right = dispatch.stock_backward
    monkeypatch.setattr(dispatch, "stock_backward", broken)
    made = Tuner()
    times = {d: dict.fromkeys(kernels_for(d), 1.0) | {"stock": 0.1} for d in native.DIRECTIONS}
    made.winners.seconds[SHAPE.key] = times
    with pytest.warns(UserWarning, match="stock computes a wrong dw here and is not used"):
        choice = made.tune(SHAPE)
    assert choice.fwd == choice.dx == "stock" and choice.dw != "stock"
    assert Tuner().known(SHAPE) == choice  # also for those who only read the file
    assert Tuner(memory_bytes=0, winners=made.winners).known(SHAPE).dw == "convgemm_trans"


@needs_library
def test_a_kernel_of_ours_that_is_wrong_here_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(direction: str, kernel: str, *rest: Any) -> torch.Tensor:
        y = right(direction, kernel, *rest)
        return y * 2 if kernel == "convgemm" and y.dtype == torch.float32 else y

    right = checks.run
    monkeypatch.setattr(checks, "run", broken)
    made = with_times(**dict.fromkeys(kernels_for("fwd"), 1.0) | {"convgemm": 0.1})
    with pytest.warns(UserWarning, match="convgemm computes a wrong fwd here"):
        assert made.tune(SHAPE, ["fwd"]).fwd == "stock"


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_that_are_right_are_not_accused(dtype: str) -> None:
    shapes = [
        ConvShape((1, 1, 1, 1), (1, 1, 1, 1), dtype=dtype),
        ConvShape((2, 8, 9, 8, 7), (16, 8, 3, 3, 3), padding=(1, 1, 1), dtype=dtype),
        ConvShape((2, 8, 300), (8, 1, 5), groups=8, dtype=dtype),
    ]
    for shape in shapes:
        tensors = tuner.random_tensors(shape)
        for direction in native.DIRECTIONS:
            assert max(checks.errors(shape, direction, tensors).values()) < checks.LIMIT / 8


def convolved(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and dw of a convolution as layers of a parallel model run it."""
    y = tuner.convolution(x, w, None, [1, 1], [1, 1], [1, 1], 1)
    return [y, *torch.autograd.grad(y.square().sum(), (x, w))]


def prefer_winograd(*shapes: ConvShape) -> None:
    """Leaves times on disk by which Winograd's kernels win every direction."""
    winners = Winners.load(torch.get_num_threads())
    times = {d: dict.fromkeys(kernels_for(d), 1.0) | {"winograd4": 0.1} for d in native.DIRECTIONS}
    winners.seconds = {shape.key: times for shape in shapes}
    winners.save()


@needs_library
def test_a_file_of_times_counts_only_while_tuning() -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(size, requires_grad=True) for size in (SHAPE.x, SHAPE.w))
    y = torch.nn.functional.conv2d(x, w, None, 1, 1)
    stock = [y, *torch.autograd.grad(y.square().sum(), (x, w))]
    prefer_winograd(SHAPE)
    for ours, truth in zip(convolved(x, w), stock, strict=True):
        assert torch.equal(ours, truth)
    with tuner.tuning():
        tuned = convolved(x, w)
    assert tuner.tuner().known(SHAPE).fwd == "winograd4"
    for ours, truth in zip(tuned, stock, strict=True):
        assert not torch.equal(ours, truth)
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-3)
    for ours, truth in zip(convolved(x, w), stock, strict=True):
        assert torch.equal(ours, truth)


@needs_library
def test_a_parallel_model_is_torch_bit_for_bit_whatever_is_on_disk() -> None:
    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(4, 8, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 8, 3, padding=1),
        )

    model, x = network(), torch.randn(SHAPE.x)
    prefer_winograd(SHAPE, ConvShape((2, 8, 9, 9), (8, 8, 3, 3), padding=(1, 1)))
    parallel = shardwise.parallelize(network(), shardwise.Plan.uniform(shardwise.capture(model, x)))
    for one in (model, parallel):
        one(x).square().sum().backward()
    assert torch.equal(parallel(x), model(x))
    for ours, truth in zip(parallel.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, truth.grad)


def test_outside_tuning_no_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Winners, "load", lambda *_: pytest.fail("the file was read"))
    x, w = (torch.randn(size, requires_grad=True) for size in (SHAPE.x, SHAPE.w))
    convolved(x, w)


@needs_library
def test_convolutions_are_timed_while_tuning() -> None:
    x, w = (torch.randn(size, requires_grad=True) for size in (SHAPE.x, SHAPE.w))
    with tuner.tuning():
        y = convolved(x, w)[0]
    torch.testing.assert_close(
        y, torch.nn.functional.conv2d(x, w, None, 1, 1), rtol=1e-4, atol=1e-4
    )
    assert tuner.tuner().winners.times(SHAPE, "fwd")


@needs_library
@pytest.mark.parametrize("num_dims", [1, 3])
def test_lines_and_volumes_are_timed_too(num_dims: int) -> None:
    x, w = torch.randn(2, 4, *[5] * num_dims), torch.randn(8, 4, *[3] * num_dims)
    ones = [1] * num_dims
    with tuner.tuning():
        y = tuner.convolution(x, w, None, ones, ones, ones, 1)
    torch.testing.assert_close(y, STOCK_OF[w.ndim](x, w, None, 1, 1), rtol=1e-4, atol=1e-4)
    shape = ConvShape(tuple(x.shape), tuple(w.shape), padding=tuple(ones))
    times = tuner.tuner().winners.times(shape, "dw")
    assert times.keys() >= {"stock", "base", "convgemm_trans"}
