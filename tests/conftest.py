"""Fixtures that several tests share."""

from __future__ import annotations

import os

import pytest

# Waiting threads sleep: on busy cores, tests of several threads that spin take 5 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP reads it when torch is loaded

from convolutions import SEED
from shardwise.cli import main

os.environ["SHARDWISE_TEST_SEED"] = str(SEED)  # the same in all processes that run tests

# Files whose tests start programs, shape links or spin: one after the other, and first.
COMMANDS = ("documents", "examples", "mpi", "launch", "faults", "emulate", "cli", "matrix")

Run = tuple[int, str, str]  # exit code, standard output and standard error


def pytest_report_header() -> str:
    return f"SHARDWISE_TEST_SEED={SEED} repeats the random shapes of kernels"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests share a process where several run tests (pytest -n): a file, all commands."""

    def is_command(item: pytest.Item) -> bool:
        return item.path.stem.removeprefix("test_") in COMMANDS

    for item in items:
        group = "commands" if is_command(item) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=is_command, reverse=True)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Runs the command line; returns exit code, standard output and standard error."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> Run:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err  # type: ignore[return-value]

    return run
