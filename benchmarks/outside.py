"""Tries Shardwise on what other people wrote: every answer is right, or refused with a sentence.

Sources are PyTorch's own lists of operators and modules with their samples and their errors,
convolutions in the style of oneDNN's benchmarks, what rivals test themselves on, the networks of
torchvision, timm and MONAI, and random programs and modules. Each case is captured once and run
under a few plans, all ranks in one process, and compared with plain torch: outputs, all gradients,
statistics, weights, random numbers.

    python benchmarks/outside.py --source op_db --sample 500
    python benchmarks/outside.py --only op_db:nn.functional.pad.circular:float32:3
    python benchmarks/outside.py --random 10000
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from outside_cases import RANDOM, SOURCES, source
from outside_cases.trial import BAD, CLASSES, EXPORT, REFUSED, SLOW, Verdict
from outside_cases.workers import Chunk, run


def chunks_of(names: list[str], seed: int, everything: bool, sample: int | None) -> list[Chunk]:
    """What is tried: some or all cases of every group, or so many groups with a case each."""
    found = []
    for name in names:
        module = source(name)
        for group in module.groups():
            most = None if everything else 1 if sample else module.most(group)
            found.append(Chunk(name, group, most, seed))
    random.Random(seed).shuffle(found)
    return found[:sample]


def chunks_named(only: str, seed: int) -> list[Chunk]:
    """The one case of this name, or all cases of groups whose names begin so."""
    name = only.split(":")[0]
    if name not in SOURCES + RANDOM:
        sys.exit(f"there is no source {name!r}; there are {', '.join(SOURCES + RANDOM)}")
    groups = source(name).groups()
    one = only.split(":", 1)[-1].rpartition(":")[0]
    if one in groups:
        return [Chunk(name, one, None, seed, only)]
    found = [group for group in groups if f"{name}:{group}:".startswith(only)]
    if not found:
        sys.exit(f"there is no case {only!r}")
    return [Chunk(name, group, None, seed) for group in found]


def chunks_again(file: Path) -> list[Chunk]:
    """The bad cases of an earlier run, from what it wrote."""
    found = []
    for row in json.loads(file.read_text()):
        name, _, rest = row["case"].partition(":")
        if row["kind"] in (*BAD, SLOW):
            found.append(Chunk(name, rest.rpartition(":")[0], None, row["seed"], row["case"]))
    return found


def table(verdicts: list[Verdict]) -> str:
    """Counts and shares of each class, per source."""
    lines = [f"{'':<14}{'cases':>7}" + "".join(f"{kind:>17}" for kind in CLASSES)]
    names = sorted({v.case.split(":")[0] for v in verdicts})
    for name in [*names, "all"] if len(names) > 1 else names:
        counts = Counter(v.kind for v in verdicts if name in ("all", v.case.split(":")[0]))
        total = sum(counts.values())
        cells = "".join(f"{counts[k]:>9}{counts[k] / total:>8.1%}" for k in CLASSES)
        lines.append(f"{name:<14}{total:>7}{cells}")
    return "\n".join(lines)


def common_reasons(
    verdicts: list[Verdict], kinds: tuple[str, ...], most: int = 15
) -> Iterator[str]:
    """The commonest reasons, with names and numbers left out, and an example of each."""
    examples: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.kind in kinds:
            plain = re.sub(r"'[^']*'|\d+(x\d+)*", "#", verdict.reason)[:140]
            examples.setdefault(plain, []).append(verdict)
    if examples:
        yield f"\ncommonest of {', '.join(kinds)}:"
    for found in sorted(examples.values(), key=len, reverse=True)[:most]:
        yield f"  {len(found):>5} x {found[0].reason[:160]}   ({found[0].case})"


def report(verdicts: list[Verdict], minutes: float) -> str:
    num_runs = sum(verdict.num_runs for verdict in verdicts)
    lines = [
        "",
        table(verdicts),
        f"{len(verdicts)} cases, {len(verdicts) / minutes:.0f} a minute; with their plans "
        f"{num_runs} runs, {num_runs / minutes:.0f} a minute",
    ]
    for kinds in ((REFUSED,), (EXPORT,), BAD):
        lines += common_reasons(verdicts, kinds)
    return "\n".join(lines)


def told(verdict: Verdict, in_full: bool) -> str:
    """What was found, and how to see it again."""
    again = f"python benchmarks/outside.py --only '{verdict.case}' --seed {verdict.seed}"
    text = f"{verdict.kind}: {verdict.case}: {verdict.reason[:400]}\n    {again}"
    return f"{text}\n    {verdict.plan}" if in_full else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = SOURCES + RANDOM
    parser.add_argument("--source", action="append", choices=every, help=f"{', '.join(SOURCES)}")
    parser.add_argument("--only", help="one case, or all whose names begin so")
    parser.add_argument("--again", type=Path, help="the bad cases that a run wrote with --json")
    parser.add_argument("--seed", type=int, default=0, help="of samples, plans and arrivals")
    parser.add_argument("--sample", type=int, help="so many cases, each of another group")
    parser.add_argument("--random", type=int, help="so many runs of random programs and modules")
    parser.add_argument("--all", action="store_true", help="every sample of every group")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no more then")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.source or list(RANDOM if arguments.random else SOURCES)
    if arguments.only:
        chunks = chunks_named(arguments.only, arguments.seed)
    elif arguments.again:
        chunks = chunks_again(arguments.again)
    else:
        chunks = chunks_of(names, arguments.seed, arguments.all, arguments.sample)
    print(f"{len(chunks)} groups, seed {arguments.seed}", flush=True)
    verdicts: list[Verdict] = []
    begin = time.monotonic()

    def go_on() -> bool:
        in_time = time.monotonic() < begin + 60 * arguments.minutes
        num_runs = sum(verdict.num_runs for verdict in verdicts)
        return in_time and (not arguments.random or num_runs < arguments.random)

    with suppress(KeyboardInterrupt):  # what was found until then is told
        for verdict in run(chunks, arguments.jobs, go_on):
            verdicts.append(verdict)
            if verdict.kind in (*BAD, SLOW) or arguments.only:
                print(told(verdict, bool(arguments.only)), flush=True)
    print(report(verdicts, (time.monotonic() - begin) / 60))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    if any(v.kind in BAD for v in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
