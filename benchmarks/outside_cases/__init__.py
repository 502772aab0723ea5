"""What other people wrote, as cases to try: one module per source."""

from __future__ import annotations

from types import ModuleType

SOURCES = ("op_db", "modules", "errors", "convolutions", "peers", "networks")


def source(name: str) -> ModuleType:
    """The module of a source; imported when it is asked for, since some import large packages."""
    from importlib import import_module

    return import_module(f"outside_cases.{name}")
