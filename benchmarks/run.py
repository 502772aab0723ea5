"""Runs benchmarks one after the other and writes what they print to benchmarks/RESULTS.md.

    python benchmarks/run.py [NAME ...] [--full] [--list]

Runs are short ones unless --full is given. Figures go to build/bench/NAME.json. Nothing else should
run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from results import machine

HERE = Path(__file__).parent
RESULTS, FIGURES = HERE / "RESULTS.md", HERE.parent / "build" / "bench"


class Benchmark(NamedTuple):
    """Minutes on two cores of a short run with these options, and of a full one without."""

    minutes: float
    options: tuple[str, ...] = ()
    full: float | None = None


BENCHMARKS = {
    "head_to_head": Benchmark(30, ("--rounds", "2"), full=40),
    "overlap": Benchmark(5, ("--batches", "16", "--rounds", "3"), full=7),
    "strong_scaling": Benchmark(5, ("--rounds", "3", "--size", "32"), full=15),
    "allreduce": Benchmark(4, ("--quick",), full=12),
    "small_sums": Benchmark(1),
    "overhead": Benchmark(1, ("--rounds", "5"), full=2),
    "memory": Benchmark(1),
    "memory_cap": Benchmark(1),
    "recompute": Benchmark(3, ("--repeats", "5"), full=4),
    "too_large": Benchmark(3),
    "decode": Benchmark(3, ("--families", "tiny", "cogvideox", "--ranks", "2", "4"), full=30),
    "decode_latency": Benchmark(4, ("--rounds", "3"), full=6),
    "predict": Benchmark(3, ("--rounds", "2"), full=8),
    "predict_hosts": Benchmark(9, ("--rounds", "3"), full=12),
    "kernels": Benchmark(1, ("--every", "8"), full=20),
    "train_cpu": Benchmark(3, ("--networks", "vgg16_cifar", "--rounds", "2"), full=40),
    "threads": Benchmark(1),
    "loader": Benchmark(1, ("--seconds", "3"), full=2),
    "checkpoint": Benchmark(2, ("--rounds", "5"), full=3),
    "papers": Benchmark(2),
    "search": Benchmark(3),
}


def run(name: str, options: tuple[str, ...]) -> tuple[int, str, float]:
    """Runs one benchmark; shows its output as it comes, and returns it."""
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    command += ["--json", str(FIGURES / f"{name}.json")]
    print(f"\n== {name} {' '.join(options)}", flush=True)
    start, lines = time.perf_counter(), []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines).strip(), time.perf_counter() - start


def section(name: str, options: tuple[str, ...], text: str, seconds: float) -> str:
    command = " ".join(["python", f"benchmarks/{name}.py", *options])
    about = ", ".join(f"{key} {value}" for key, value in machine().items())
    taken = f"{datetime.date.today().isoformat()}, {seconds / 60:.1f} min; {about}."
    return f"## {name}\n\n`{command}`\n\n{taken}\n\n```text\n{text}\n```\n"


def record(name: str, text: str) -> None:
    """Puts what one benchmark printed in place of what it printed before."""
    old = RESULTS.read_text() if RESULTS.exists() else ""
    parts = [part.strip() for part in old.split("\n## ")[1:]]
    known = {part.split("\n", 1)[0]: f"## {part}\n" for part in parts} | {name: text}
    order = [key for key in BENCHMARKS if key in known]
    RESULTS.write_text("\n".join(["# Results\n", *(known[key] for key in order)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--full", action="store_true", help="as long as each takes by itself")
    parser.add_argument("--list", action="store_true", help="show what there is")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    chosen = {name: BENCHMARKS[name] for name in arguments.names}
    if arguments.full:
        chosen = {n: Benchmark(b.full or b.minutes) for n, b in chosen.items()}
    for name, benchmark in chosen.items():
        print(f"{name:<16}{benchmark.minutes:>4g} min  {' '.join(benchmark.options)}")
    print(f"{'together':<16}{sum(b.minutes for b in chosen.values()):>4g} min on two cores")
    if arguments.list:
        return
    FIGURES.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, (_, options, _) in chosen.items():
        code, text, seconds = run(name, options)
        if code:
            failed.append(name)
        else:
            record(name, section(name, options, text, seconds))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print(f"\nwritten to {RESULTS}")


if __name__ == "__main__":
    main()
