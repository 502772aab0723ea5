"""Fixtures that several tests share."""

from __future__ import annotations

import pytest

from shardwise.cli import main

Run = tuple[int, str, str]  # exit code, standard output and standard error


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
