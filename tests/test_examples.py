"""Every numbered example runs, and says what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import ROOT, run_command

EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))


def test_examples_are_numbered_without_a_gap() -> None:
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    cache = {"SHARDWISE_CACHE": str(tmp_path / "cache")}
    code, output = run_command(f"python {example}", tmp_path, **cache)
    assert code == 0, output
    assert output.strip() and "Traceback" not in output


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_how_to_run_it(example: Path) -> None:
    assert f"python examples/{example.name}" in example.read_text().split('"""')[1]
