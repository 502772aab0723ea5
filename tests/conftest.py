"""Fixtures that several tests share."""

from __future__ import annotations

import os

import pytest

# Waiting threads sleep: on busy cores, tests of several threads that spin take 5 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP reads it when torch is loaded

from convolutions import SEED
from shardwise.cli import main

Run = tuple[int, str, str]  # exit code, standard output and standard error


def pytest_report_header() -> str:
    return f"SHARDWISE_TEST_SEED={SEED} repeats the random shapes of kernels"


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
