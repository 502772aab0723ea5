"""Runs benchmarks one after the other and writes what they print to benchmarks/RESULTS.md.

    python benchmarks/run.py [NAME ...] [--list]

Figures go to build/bench/NAME.json. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from shardwise import __version__
from shardwise.kernels.winners import cpu_name

HERE = Path(__file__).parent
RESULTS, FIGURES = HERE / "RESULTS.md", HERE.parent / "build" / "bench"
# Minutes on two cores, and options beyond --json.
BENCHMARKS: dict[str, tuple[float, tuple[str, ...]]] = {
    "overhead": (2, ()),
    "memory": (2, ()),
    "memory_cap": (1, ()),
    "search": (3, ()),
    "predict": (8, ("--rounds", "3")),
    "overlap": (6, ()),
    "allreduce": (5, ()),
    "head_to_head": (25, ()),
    "strong_scaling": (10, ()),
    "papers": (11, ()),
    "loader": (2, ()),
    "checkpoint": (3, ()),
    "kernels": (20, ()),
    "train_cpu": (40, ()),
    "threads": (2, ()),
}


def hardware() -> str:
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{cpu_name()}, {os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, shardwise {__version__}"
    )


def run(name: str) -> tuple[int, str, float]:
    """Runs one benchmark; shows its output as it comes, and returns it."""
    minutes, options = BENCHMARKS[name]
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    command += ["--json", str(FIGURES / f"{name}.json")]
    print(f"\n== {name} (about {minutes:g} min)", flush=True)
    start, lines = time.perf_counter(), []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines).strip(), time.perf_counter() - start


def section(name: str, text: str, seconds: float) -> str:
    command = " ".join(["python", f"benchmarks/{name}.py", *BENCHMARKS[name][1]])
    return f"## {name}\n\n`{command}`, {seconds / 60:.1f} min\n\n```\n{text}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="show what there is")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    total = sum(BENCHMARKS[name][0] for name in arguments.names)
    print(f"{', '.join(arguments.names)}: about {total:g} minutes on two cores")
    if arguments.list:
        return
    FIGURES.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    parts = [f"# Results\n\n{today}, {hardware()}.\n"]
    failed = []
    for name in arguments.names:
        code, text, seconds = run(name)
        failed += [name] if code else []
        parts.append(section(name, text or "(no output)", seconds))
        RESULTS.write_text("\n".join(parts))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print(f"\nwritten to {RESULTS}")


if __name__ == "__main__":
    main()
