"""Runs cells of the fault matrix on real local workers; as a program, all of them, as a table."""

from __future__ import annotations

import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from faults.table import ALONE, FAULTS, PLACES, SENSELESS, Cell, cells
from faults.worker import FIRST_STEPS, LAST_STEP, STORE, Samples, export_alone, work
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.checkpoint.weight_files import read_state
from shardwise.data.pack import pack

WORLD, TIMEOUT = 3, 8.0
STARTING = 120.0  # seconds in which the fault must come, on a machine that may be busy
SLACK = 12.0  # seconds beyond the timeout, on such a machine
Ended = tuple[str, str, float]  # how, with what text, when


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a cell ended, and what is wrong with that."""

    cell: Cell
    seconds: float  # from the fault until all had ended
    ends: dict[int, Ended]
    wrong: str = ""

    @property
    def sentence(self) -> str:
        return next((text for kind, text, _ in self.ends.values() if kind == "sentence"), "done")


def prepare(run: Path) -> None:
    """A run with complete checkpoints, from which all cells go on."""
    ends, _ = _run_workers(None, run)
    assert all(kind == "done" for kind, _, _ in ends.values()), ends
    (run / "model.pt").write_bytes(b"old")
    pack(Samples(), run / STORE, num_stripes=2)


def try_cell(cell: Cell, prepared: Path, folder: Path) -> Outcome:
    """Copies the run, lets it go on with the fault, and judges its ends."""
    run = folder / str(cell)
    shutil.copytree(prepared, run)
    if cell.damaged:
        newest = max(StepFolders(run / "checkpoints").complete().items())[1]
        cut_off(run / STORE if cell.place == "data" else newest, random.Random(str(cell)))
    ends, struck = _run_workers(cell, run)
    last = max((when for _, _, when in ends.values()), default=0.0)
    outcome = Outcome(cell, last - struck if struck else 0.0, ends)
    found = [] if struck or cell.damaged else ["the fault never came"]
    found += [*_wrong_ends(outcome), *_lost(cell, run)]
    return Outcome(cell, outcome.seconds, ends, "; ".join(found))


def cut_off(folder: Path, chance: random.Random) -> None:
    """A file of a checkpoint or a store loses its end, as by a disk that failed."""
    path = chance.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


# -- processes -------------------------------------------------------------------------------------


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwise", "faults.worker"])
    return context


def _run_workers(cell: Cell | None, run: Path) -> tuple[dict[int, Ended], float]:
    """How every rank that can has ended, and when the fault came."""
    context, store = (
        _context(),
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    )
    alone = cell is not None and cell.place in ALONE
    pipes: list[Connection] = []
    jobs = []
    for rank in range(1 if alone else WORLD):
        mine, theirs = context.Pipe()
        args: tuple[Any, ...] = (rank, WORLD, store.port, cell, run, TIMEOUT, theirs)
        if alone:
            args = (cell, run, TIMEOUT, theirs)
        jobs.append(context.Process(target=export_alone if alone else work, args=args))
        jobs[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        return _listen(cell, pipes)
    finally:
        for job in jobs:
            job.kill()  # one that is stopped, too
        for job in jobs:
            job.join()


def _listen(cell: Cell | None, pipes: list[Connection]) -> tuple[dict[int, Ended], float]:
    start, struck = time.monotonic(), 0.0
    end, ends, dead = start + STARTING, {}, set()
    stopped: set[int] = set()
    while waiting := {p: r for r, p in enumerate(pipes) if r not in ends.keys() | dead | stopped}:
        ready = wait(list(waiting), timeout=max(end - time.monotonic(), 0.0))
        if not ready:
            return ends | {
                rank: ("hangs", "", time.monotonic()) for rank in waiting.values()
            }, struck
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                kind, text, when = pipe.recv()
            except (EOFError, ConnectionError):
                dead.add(waiting[pipe])
                continue
            if kind == "struck":
                struck, end = when, time.monotonic() + 3 * TIMEOUT + SLACK
                stopped |= {waiting[pipe]} if cell and cell.fault == "stop" else set()
            else:
                ends[waiting[pipe]] = (kind, text, when)
    return ends | {rank: ("dead", "", struck) for rank in dead}, struck


# -- judging ---------------------------------------------------------------------------------------


def _wrong_ends(outcome: Outcome) -> list[str]:
    cell, found = outcome.cell, []
    victim = cell.victim(WORLD)
    for rank, (kind, text, _) in outcome.ends.items():
        if rank == victim and cell.dies:
            found += [] if kind == "dead" else [f"the victim is {kind}"]
        elif rank == victim and cell.fault == "exception" and kind == "error":
            pass  # it is the user's own, and is the user's to see
        elif kind != cell.ends:
            found.append(f"rank {rank} is {kind} {text}")
        elif kind == "sentence" and (not re.search(cell.pattern(WORLD), text) or "\n" in text):
            found.append(f"rank {rank} says {text!r}, which is not {cell.pattern(WORLD)!r}")
    if cell.ends != "done" and outcome.seconds > TIMEOUT + SLACK:
        found.append(f"it took {outcome.seconds:.1f} s")
    return found


def _lost(cell: Cell, run: Path) -> list[str]:
    """What is no longer there, or cannot be read."""
    complete, found = StepFolders(run / "checkpoints").complete(), []
    damaged = {FIRST_STEPS} if cell.damaged and cell.place != "data" else set()
    for step, path in complete.items():
        if step not in damaged:
            state = read_state(path)
            found += [] if all(t.isfinite().all() for t in state.values()) else [f"{path} is wrong"]
    wanted = LAST_STEP if cell.ends == "done" else FIRST_STEPS
    if max(complete, default=-1) < wanted:
        found.append(f"the checkpoint of step {wanted} is gone")
    if (run / "model.pt").read_bytes() != b"old":
        torch.load(run / "model.pt", weights_only=True)
    return found


def main() -> int:
    """Prints the whole matrix, cell by cell."""
    seed, wrong = int(sys.argv[1]) if len(sys.argv) > 1 else 0, 0
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name) / "run")
        for cell in cells(seed):
            outcome = try_cell(cell, Path(name) / "run", Path(name))
            wrong += bool(outcome.wrong)
            mark = f"WRONG: {outcome.wrong}" if outcome.wrong else outcome.sentence
            print(f"{cell.place:11s} {cell.fault:10s} {outcome.seconds:6.1f} s  {mark}", flush=True)
    for (fault, place), reason in SENSELESS.items():
        print(f"{place:11s} {fault:10s}      -    makes no sense: {reason}")
    print(f"{len(FAULTS)} faults at {len(PLACES)} places, {wrong} cells wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
