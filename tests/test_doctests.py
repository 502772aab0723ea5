"""What docstrings show is true; examples that need a run, or several workers, are only shown."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
MPI = ("mpi.py", "mpi_work.py")  # importing these starts MPI
NAMES = [
    ".".join(("shardwise", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    if ">>>" in path.read_text() and path.name not in MPI
]
SHOWN = {
    "save_dcp",
    "load_dcp",  # with names that the reader knows: a model, its plan, the folder of a run
    *("Checkpoints", "export", "load_weights", "write_report", "Trainer", "verify_model"),
    *("plan", "parallelize", "parallelize_decoder", "of", "optimizer", "no_sync", "record"),
    "NativeBatchNorm",  # needs a compiler
}


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_a_module_are_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where some write a file
    runner = doctest.DocTestRunner()
    for found in doctest.DocTestFinder().find(import_module(name)):
        if found.name.rpartition(".")[2] not in SHOWN:
            runner.run(found)
    assert not runner.failures
