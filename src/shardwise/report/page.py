"""The report as one HTML file: template, style and scripts of `assets` around the data."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.files import write_whole

SCRIPTS = ("base.js", "plan.js", "bars.js", "timeline.js", "charts.js", "page.js")


def render(data: dict[str, Any]) -> str:
    """The page: it loads nothing, so that it works offline and as an attachment."""
    folder = files("shardwise.report") / "assets"

    def part(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    filled = {
        "TITLE": escape(str(data["title"])),
        "STYLE": part("page.css"),
        "DATA": _embedded(data),
        "SCRIPT": "\n".join(map(part, SCRIPTS)),
    }
    page = part("page.html")
    pieces = [piece.split("}}", 1) for piece in page.split("{{")]
    return pieces[0][0] + "".join(filled[name] + rest for name, rest in pieces[1:])


def _embedded(data: dict[str, Any]) -> str:
    """JSON that no name in it can end early: "<" is written as an escape."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def write_page(path: str | Path, data: dict[str, Any]) -> None:
    """Writes the page to a file."""
    try:
        write_whole(path, render(data).encode(errors="replace"))
    except OSError as error:
        raise ShardwiseError(f"the report {str(path)!r} cannot be written: {error}") from None
