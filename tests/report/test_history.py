"""metrics.jsonl: what it becomes, and what is said where it is broken."""

from __future__ import annotations

from math import nan
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.report.history import POINTS, charts, measured_memory, read_history


def test_every_number_becomes_a_curve_and_losses_share_a_chart() -> None:
    history = [
        {"step": 1, "epoch": 0, "loss": 2.5, "lr": 0.1, "note": "warm-up"},
        {"step": 2, "epoch": 0, "loss": 2.0, "lr": 0.2, "test_loss": 2.2, "accuracy": 0.5},
    ]
    found = charts(history)
    assert [chart["title"] for chart in found] == ["loss", "accuracy", "lr"]
    loss = found[0]
    assert loss["x"] == "step"
    assert [curve["name"] for curve in loss["curves"]] == ["loss", "test_loss"]
    assert loss["curves"][0] == {
        "name": "loss",
        "x": [1, 2],
        "y": [2.5, 2.0],
        "each": 1,
        "last": 2.0,
    }


def test_lines_are_counted_where_not_all_have_a_step() -> None:
    (chart,) = charts([{"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 2.0}])
    assert chart["x"] == "epoch"
    (chart,) = charts([{"epoch": 1, "loss": 3.0}, {"loss": 2.0}])
    assert chart["x"] == "line" and chart["curves"][0]["x"] == [1, 2]


def test_what_is_no_finite_number_is_left_out() -> None:
    history = [{"step": i, "loss": y} for i, y in enumerate((1.0, nan, float("inf"), 10**400, 2.0))]
    (chart,) = charts(history)
    assert chart["curves"][0]["x"] == [0, 4]
    assert charts([{"loss": True}, {"loss": "low"}, {}]) == []


def test_a_long_history_is_shown_by_means() -> None:
    (chart,) = charts([{"step": i, "loss": float(i)} for i in range(10_000)])
    curve = chart["curves"][0]
    assert len(curve["y"]) == POINTS and curve["each"] == 25
    assert curve["y"][0] == 12.0 and curve["last"] == 9999.0


def test_memory_is_that_of_the_last_line_that_has_it() -> None:
    history = [{"memory_bytes": [1, 2]}, {"memory_bytes": [3, 4.0]}, {"loss": 1.0}]
    assert measured_memory(history) == [3, 4]
    assert measured_memory([{"memory_bytes": ["a"]}]) == []


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n\n{"step": 2, "lo')
    assert read_history(path) == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\nloss 2\n{"step": 3}\n', "line 2 is not JSON: 'loss 2'"),
        ('{"step": 1}\n[1, 2]\n', "line 2 must be an object such as"),
        ("[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ShardwiseError, match=message):
        read_history(path)
