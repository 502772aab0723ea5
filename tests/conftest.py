"""Fixtures that several tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Waiting threads sleep: on busy cores, tests of several threads that spin take 5 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP reads it when torch is loaded

from convolutions import SEED
from shardwise.cli.app import main

os.environ["SHARDWISE_TEST_SEED"] = str(SEED)  # the same in all processes that run tests

# Files whose tests start programs, shape links or spin: one after the other, and first.
COMMANDS = ("documents", "examples", "mpi", "launch", "faults", "emulate", "cli", "matrix")

LONG = ("interruptions", "properties", "trainer", "gradients", "checkpoints", "kills")

Run = tuple[int, str, str]  # exit code, standard output and standard error


def pytest_report_header() -> str:
    return f"SHARDWISE_TEST_SEED={SEED} repeats the random shapes of kernels"


def _group(nodeid: str) -> str:
    """What runs in one process where several run tests (pytest -n): a file, or all commands."""
    name = Path(nodeid.split("::")[0]).stem.removeprefix("test_")
    return "commands" if name in COMMANDS else name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins early, so that all processes end together."""
    order = {name: place for place, name in enumerate(("commands", *LONG))}
    items.sort(key=lambda item: order.get(_group(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Groups(config, log)


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
