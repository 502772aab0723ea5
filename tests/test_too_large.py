"""The benchmark of a model that is too large for one worker, with a smaller one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import ROOT

OPTIONS = "--channels 96 192 384 --edge 8 --steps 2 --limit 110MiB"


@pytest.mark.deep
def test_four_workers_train_a_model_that_one_cannot_hold(tmp_path: Path) -> None:
    program, figures = ROOT / "benchmarks/too_large.py", tmp_path / "figures.json"
    # A program of its own: what it sets for its processes is read when they are started.
    command = [sys.executable, str(program), *OPTIONS.split(), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())["figures"]
    assert "can't allocate memory" in found["weights alone"]
    assert len(found["together"]) == 4
    for own in found["together"]:
        assert own["weights"] < found["weights"] / 2
        assert own["peak"] <= found["limit"]
        assert own["losses"] == pytest.approx(found["alone without limit"], rel=1e-5)
