"""A script for DDP is moved to Shardwise by a few lines, and trains as it does on one device."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import ROOT, run_command

FOLDER = ROOT / "examples/from_ddp"
DDP, SHARDWISE = (FOLDER / name for name in ("ddp_script.py", "shardwise_script.py"))
PAGE = ROOT / "docs/coming-from-ddp.md"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
Printed = list[tuple[str, float]]


def changes() -> list[str]:
    """The lines in which the two scripts differ, without those around them."""
    files = (file.read_text().splitlines() for file in (DDP, SHARDWISE))
    lines = list(difflib.unified_diff(*files, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@") and line[1:].strip()]


def test_five_lines_move_a_script_from_ddp_to_shardwise() -> None:
    assert 0 < sum(line.startswith("+") for line in changes()) <= 5


def test_the_page_shows_the_lines_that_change() -> None:
    shown = "```diff\n" + "\n".join(changes()) + "\n```"
    assert shown in PAGE.read_text(), f"{PAGE.name} should show\n{shown}"


def printed(output: str) -> Printed:
    """What a run printed: "epoch 1 step 2 loss", and the number."""
    found = re.findall(r"^(epoch .*) ([\d.]+)$", output, re.MULTILINE)
    return [(name, float(value)) for name, value in found]


def alone(folder: Path, *options: str) -> Printed:
    """What the script for DDP prints on one process, where it needs no DDP."""
    code, output = run_command(f"python {DDP} --file one.pt {' '.join(options)}", folder)
    assert code == 0, output
    return printed(output)


def on_workers(folder: Path, script: Path, world: int, *options: str, split: str = "") -> Printed:
    """What rank 0 prints under torchrun, with weights and samples split as told."""
    text = script.read_text()
    if split:
        assert "n=world" in text
        script = folder / f"{split}.py"
        script.write_text(text.replace("n=world", f"{split}=world"))
    command = [*TORCHRUN, f"--nproc-per-node={world}", str(script), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return printed(done.stdout)


def test_the_moved_script_trains_and_goes_on_under_any_split_as_on_one_device(
    tmp_path: Path,
) -> None:
    exact = ("--precision", "float64")
    found = on_workers(tmp_path, SHARDWISE, 2, *exact, "--epochs", "1", split="h")
    found += on_workers(tmp_path, SHARDWISE, 3, *exact, "--epochs", "2", split="f")
    expected = alone(tmp_path, *exact, "--epochs", "2")
    assert len(expected) == 32 and [name for name, _ in found] == [name for name, _ in expected]
    assert dict(found) == pytest.approx(dict(expected), rel=1e-8)


def test_the_moved_script_trains_in_bfloat16_up_to_its_noise(tmp_path: Path) -> None:
    options = ("--precision", "bfloat16", "--epochs", "1")
    found = on_workers(tmp_path, SHARDWISE, 2, *options, split="n")
    losses = [pair for pair in alone(tmp_path, *options) if pair[0].endswith("loss")]
    assert dict(found) | dict(losses) == pytest.approx(dict(found), rel=0.03)


def test_the_script_for_ddp_runs_under_ddp(tmp_path: Path) -> None:
    assert len(on_workers(tmp_path, DDP, 2, "--epochs", "1")) == 8
