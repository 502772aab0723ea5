"""The papers' tables by simulation: each on its own machine, ours next to theirs and the error.

    python benchmarks/papers.py [--papers p2 p3 p4 p5] [--quick] [--json build/papers.json]

Every figure comes from the planner, the simulator or the network model, on the preset of the
paper's machine. What a paper leaves out is assumed from a data sheet or from its other numbers, and
printed below its table; published figures and assumptions are in benchmarks/published/*.yaml. The
goal is 15 %; where a figure is further off, the table is followed by what the simulation says why.
P1's variants are measured by train_cpu.py. All takes about three minutes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from published import p2, p3, p4, p5
from published.figures import GOAL, Result
from results import save

PAPERS = {"p2": p2.run, "p3": p3.run, "p4": p4.run, "p5": p5.run}


def summary(results: list[Result]) -> str:
    figures = [figure for result in results for figure in result.figures]
    within = sum(figure.within for figure in figures)
    return f"{within} of {len(figures)} figures within {100 * GOAL:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--papers", nargs="*", default=list(PAPERS), choices=list(PAPERS))
    parser.add_argument("--quick", action="store_true", help="the cheap figures only, in seconds")
    parser.add_argument("--json", type=Path, default=Path("build/papers.json"))
    arguments = parser.parse_args()
    console, results, start = Console(width=110), [], time.perf_counter()
    for name in arguments.papers:
        results.append(PAPERS[name](quick=arguments.quick))
        results[-1].show(console)
    console.print(f"{summary(results)}, {time.perf_counter() - start:.0f} s")
    save(arguments.json, [result.as_data() for result in results])


if __name__ == "__main__":
    main()
