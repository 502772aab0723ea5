"""The curves of a run, as TensorBoard itself reads them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwise.training.run_folder import RunFolder


def written(path: Path, begin: int, steps: range, loss: float) -> None:
    folder = RunFolder(path, first=True)
    folder.begin({}, "{}", begin, None)
    for step in steps:
        folder.add(step=step, loss=loss / step, lr=0.1, epoch=1)
    folder.close()


def test_tensorboard_reads_the_curves_and_forgets_what_a_restart_undoes(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written(tmp_path, 0, range(1, 400), loss=1.0)
    written(tmp_path, 300, range(301, 302), loss=2107.0)
    scalars = {"scalars": 0}
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance=scalars)
    found.Reload()
    loss = found.Scalars("loss")
    assert [point.step for point in loss] == list(range(1, 302))
    assert loss[1].value == pytest.approx(0.5) and loss[-1].value == pytest.approx(7.0)
    assert set(found.Tags()["scalars"]) == {"loss", "lr"}


def test_without_tensorboard_there_are_metrics_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    written(tmp_path, 0, range(1, 3), loss=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {"step": 2, "loss": 0.5, "lr": 0.1, "epoch": 1}
    assert not (tmp_path / "tensorboard").exists()
