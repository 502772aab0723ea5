"""Tries Shardwise on what other people wrote: every answer is right, or refused with a sentence.

Sources are PyTorch's own lists of operators and modules with their samples and their errors,
convolutions in the style of oneDNN's benchmarks, what rivals test themselves on, and the networks
of torchvision, timm and MONAI. Each case is captured once and run under a few plans, all ranks
in one process, and compared with plain torch: outputs, all gradients, statistics, weights,
random numbers.

    python benchmarks/outside.py --source op_db --sample 500
    python benchmarks/outside.py --only op_db:nn.functional.pad.circular:float32:3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from outside_cases import SOURCES, source
from outside_cases.trial import BAD, CLASSES, EXPORT, REFUSED, SLOW, Verdict
from outside_cases.workers import Chunk, run


def chunks_of(names: list[str], seed: int, everything: bool, sample: int | None) -> list[Chunk]:
    """What is tried: some or all cases of every group, or so many groups with a case each."""
    found = []
    for name in names:
        module = source(name)
        for group in module.groups():
            most = None if everything else module.most(group)
            found.append(Chunk(name, group, most, seed))
    random.Random(seed).shuffle(found)
    if sample is not None:
        found = [Chunk(c.source, c.group, 1, seed) for c in found[:sample]]
    return found


def chunks_named(only: str, seed: int) -> list[Chunk]:
    """The one case of this name, or all cases of groups whose names begin so."""
    name = only.split(":")[0]
    if name not in SOURCES:
        sys.exit(f"there is no source {name!r}; there are {', '.join(SOURCES)}")
    groups = source(name).groups()
    one = only.split(":", 1)[-1].rpartition(":")[0]
    if one in groups:
        return [Chunk(name, one, None, seed, only)]
    return [
        Chunk(name, group, None, seed) for group in groups if f"{name}:{group}:".startswith(only)
    ]


def table(verdicts: list[Verdict]) -> str:
    """Counts and shares of each class, per source; shares are of what torch can run."""
    lines = [f"{'':<14}{'cases':>7}" + "".join(f"{kind:>17}" for kind in CLASSES)]
    names = sorted({v.case.split(":")[0] for v in verdicts})
    for name in [*names, "all"] if len(names) > 1 else names:
        counts = Counter(v.kind for v in verdicts if name in ("all", v.case.split(":")[0]))
        total = counts.total()
        cells = "".join(f"{counts[k]:>9}{counts[k] / total:>8.1%}" for k in CLASSES)
        lines.append(f"{name:<14}{total:>7}{cells}")
    return "\n".join(lines)


def common_reasons(verdicts: list[Verdict], kinds: tuple[str, ...], most: int) -> list[str]:
    """The commonest reasons, with names and numbers left out, and an example of each."""

    def plain(text: str) -> str:
        return re.sub(r"'[^']*'|\d+", "#", text)[:140]

    counts = Counter(plain(v.reason) for v in verdicts if v.kind in kinds)
    examples = {plain(v.reason): v for v in verdicts if v.kind in kinds}
    return [
        f"  {count:>5} x {examples[key].reason[:160]}   ({examples[key].case})"
        for key, count in counts.most_common(most)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", action="append", choices=SOURCES, help="all by default")
    parser.add_argument("--only", help="one case, or all whose names begin so")
    parser.add_argument("--seed", type=int, default=0, help="of samples, plans and arrivals")
    parser.add_argument("--sample", type=int, help="so many cases, each of another group")
    parser.add_argument("--all", action="store_true", help="every sample of every group")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no more then")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.source or list(SOURCES)
    if arguments.only:
        chunks = chunks_named(arguments.only, arguments.seed)
    else:
        chunks = chunks_of(names, arguments.seed, arguments.all, arguments.sample)
    print(f"{len(chunks)} groups, seed {arguments.seed}", flush=True)
    begin, verdicts = time.monotonic(), []
    end = begin + 60 * arguments.minutes
    for verdict in run(chunks, arguments.jobs, lambda: time.monotonic() < end):
        verdicts.append(verdict)
        if verdict.kind in (*BAD, SLOW) or arguments.only:
            print(f"{verdict.kind}: {verdict.case}: {verdict.reason[:400]}", flush=True)
            print(
                f"    python benchmarks/outside.py --only '{verdict.case}' --seed {arguments.seed}"
            )
            if arguments.only:
                print(f"    {verdict.plan}")
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{table(verdicts)}\n{len(verdicts)} cases, {len(verdicts) / minutes:.0f} a minute")
    for kinds in ((REFUSED,), (EXPORT,), BAD):
        print(f"\ncommonest of {', '.join(kinds)}:")
        print("\n".join(common_reasons(verdicts, kinds, 12)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    if any(v.kind in BAD for v in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
