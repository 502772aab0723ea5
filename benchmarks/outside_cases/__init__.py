"""What other people wrote, as cases to try: one module per source."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[2] / "tests"  # whose tables are used here too
for folder in map(str, (TESTS, TESTS / "operators")):
    if folder not in sys.path:
        sys.path.append(folder)

SOURCES = ("op_db", "modules", "errors", "convolutions", "peers", "networks")
RANDOM = ("programs", "drawn")  # without an end


def source(name: str) -> ModuleType:
    """The module of a source; imported when it is asked for, since some import large packages."""
    return import_module(f"outside_cases.{name}")
