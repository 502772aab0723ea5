"""`kernels: stock` is PyTorch, whatever was timed before; `kernels: tuned` is what is fastest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.kernels import native, tuner
from shardwise.training.settings import read_settings
from shardwise.training.trainer import Trainer

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def trained(folder: Path, kernels: str) -> dict[str, torch.Tensor]:
    given = {
        "precision": "float32",
        "batch": 96,
        "options": {"width": 4},
        "steps": 3,
        "split": "n=1",
    }
    given |= {"report": False, "lr": 0.02, "kernels": kernels, "out": str(folder / kernels)}
    trainer = Trainer(read_settings(None, given), quiet=True)
    trainer.fit()
    return trainer.model.state_dict()


def test_times_on_disk_count_only_where_tuned_kernels_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuner, "_tuners", {})
    stock = trained(tmp_path / "before", "stock")
    trained(tmp_path / "timing", "tuned")
    (path,) = tmp_path.glob("kernels-*.json")
    file = json.loads(path.read_text())
    for directions in file["seconds"].values():
        for times in directions.values():
            times |= {name: 1e-9 for name in times if name.startswith("winograd")}
    path.write_text(json.dumps(file))
    tuner._tuners.clear()
    again, tuned = (trained(tmp_path / "after", kernels) for kernels in ("stock", "tuned"))
    for name, value in stock.items():
        assert torch.equal(again[name], value), name
        torch.testing.assert_close(tuned[name], value, rtol=1e-2, atol=1e-3, msg=name)
    assert any(not torch.equal(tuned[name], value) for name, value in stock.items())
