"""What a benchmark writes down beside its figures: the machine, the versions and the load."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
from pathlib import Path

import torch

from shardwise import __version__
from shardwise.kernels import library
from shardwise.kernels.tuner import cpu_name


def machine() -> dict[str, object]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lib = library()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory GiB": round(pages / 2**30, 1),
        "kernels": lib.isa if lib is not None else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shardwise": __version__,
        "system": platform.platform(),
    }


def save(path: Path | None, figures: object) -> None:
    """Writes figures to a file, if one is wanted, with the machine they are of and the date."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        found = {"machine": machine(), "date": now, "figures": figures}
        path.write_text(json.dumps(found, indent=1))


class Results:
    """Rows of figures; with a file, those of earlier runs on the same machine are kept too."""

    def __init__(self, path: Path | None, key: tuple[str, ...]) -> None:
        self.path, self.key, self.rows = path, key, []
        if path is not None and path.exists():
            data = json.loads(path.read_text())
            self.rows = data["figures"] if data["machine"] == machine() else []

    def add(self, row: dict) -> None:
        """In place of the row of an earlier run that was about the same."""
        row["load"] = round(os.getloadavg()[0], 1)
        same = [row[k] for k in self.key]
        self.rows = [old for old in self.rows if [old[k] for k in self.key] != same]
        self.rows.append(row)
        save(self.path, self.rows)


def goal(title: str, ratios: list[float], wanted: float, unit: str) -> str:
    """One line for a goal: the geometric mean and the extremes."""
    if not ratios:
        return f"{title}: not measured"
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    below = sum(ratio < wanted for ratio in ratios)
    return (
        f"{title}: {mean:.2f} in geometric mean (goal {wanted:.2f}), {spread}, "
        f"{len(ratios)} {unit}, {below} of them below {wanted:.2f}"
    )
