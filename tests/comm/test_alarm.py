"""One rank's failure ends all ranks at once, with its sentence, whatever the others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from shardwise import LostPeer, run_local
from shardwise.comm import Communicator
from shardwise.comm.world_state import world_state
from worlds import reachable, run_cases

EVERYBODY = (0, 1, 2)
LARGE = 1 << 20  # numbers that gloo carries
SOON = 2.0  # seconds


def _waits(comm: Communicator, lane: Communicator) -> dict[str, Callable[[], object]]:
    """What ranks 0 and 2 may wait for: rank 1 will not come."""
    other, x, large = 2 - comm.rank, torch.ones(4), torch.ones(LARGE)
    parts = [torch.ones(4) for _ in EVERYBODY]
    return {
        "a message": lambda: comm.exchange([], [(1, x)]).wait(),
        "a large message": lambda: comm.exchange([], [(1, large)]).wait(),
        "one that waits itself": lambda: comm.exchange([], [(other, x)]).wait(),
        "one that waits for a large message": lambda: comm.exchange([], [(other, large)]).wait(),
        "a sum": lambda: comm.all_reduce(EVERYBODY, x).wait(),
        "a large sum": lambda: comm.all_reduce(EVERYBODY, large).wait(),
        "a gather": lambda: comm.all_gather(EVERYBODY, parts, x).wait(),
        "a sum of gradients": lambda: lane.all_reduce(EVERYBODY, large).wait(),
        "a ring": lambda: lane.all_reduce(EVERYBODY, large, algorithm="ring").wait(),
        "an agreement": lambda: comm.gather_objects(comm.rank),
        "torch itself": dist.barrier,
    }


Told = tuple[str, float, str, float]


def _abort(what: str, reach: bool) -> Told:
    """What this rank is told, after how long, and the same of a call that comes later."""
    comm = Communicator(timeout=30.0)
    with reachable(reach):
        comm.prepare([])
    lane = comm.in_lane("gradients")
    lane.prepare([EVERYBODY])
    comm.gather_objects(None)
    first = _said(lambda: _fail(comm) if comm.rank == 1 else _waits(comm, lane)[what]())
    return *first, *_said(lambda: comm.exchange([], [(int(comm.rank == 0), torch.ones(3))]).wait())


def _fail(comm: Communicator) -> None:
    time.sleep(0.1)  # the others wait by then
    comm.abort("conv1: the disk is full,\nreally")


def _said(action: Callable[[], object]) -> tuple[str, float]:
    start, said = time.monotonic(), ""
    try:
        action()
    except (LostPeer, RuntimeError) as error:
        said = str(error)
    return said, time.monotonic() - start


SENTENCE = "rank 1 failed: conv1: the disk is full, really"
WAITS = list(_waits(Communicator(), Communicator()))


def _check(what: str, ranks: list[Told]) -> None:
    for rank, (first, seconds, later, at_once) in enumerate(ranks):
        assert rank == 1 or what == "torch itself" or first == SENTENCE
        assert rank == 1 or first
        assert seconds < SOON and at_once < 0.5
        assert later == SENTENCE


def test_an_abort_wakes_whoever_waits_and_ends_what_comes_later() -> None:
    for what, ranks in zip(WAITS, run_cases(_abort, 3, [(w, True) for w in WAITS]), strict=True):
        _check(what, ranks)


def test_an_abort_reaches_ranks_that_are_not_connected() -> None:
    waits = ["a message", "one that waits itself", "a ring", "an agreement"]
    for what, ranks in zip(waits, run_cases(_abort, 3, [(w, False) for w in waits]), strict=True):
        _check(what, ranks)


def _abort_early() -> str:
    comm = Communicator(timeout=30.0)
    if comm.rank == 1:
        return _said(lambda: (_fail(comm), comm.prepare([])))[0]
    return _said(lambda: comm.prepare([]))[0]


def test_an_abort_before_ranks_are_connected_reaches_them_too() -> None:
    assert run_local(_abort_early, 3) == [SENTENCE] * 3


def _fail_once_more(fails: bool) -> list[float]:
    comm, x = Communicator(timeout=20.0).in_lane("gradients"), torch.ones(LARGE)
    comm.prepare([(0, 1)])
    if fails and comm.rank == 0:
        comm.abort("enough")
    with pytest.raises(LostPeer, match="rank 0 failed: enough") if fails else nullcontext():
        comm.all_reduce((0, 1), x, algorithm="ring").wait()
    return [float(x.min()), float(x.max())]


def test_a_new_process_group_starts_afresh() -> None:
    _, after = run_cases(_fail_once_more, 2, [(True,), (False,)])
    assert after == [[2.0, 2.0]] * 2


def _leave() -> float:
    """Rank 1 ends well, long before the others have told each other all they have to say."""
    comm = Communicator(timeout=20.0)
    comm.prepare([])
    if comm.rank == 1:
        for line in world_state().alarm.lines.values():
            line.close()
        world_state().wires.close()
        return 0.0
    time.sleep(0.3)
    x = torch.ones(3)
    comm.exchange([(2 - comm.rank, x * comm.rank)], [(2 - comm.rank, x)]).wait()
    return float(x.sum())


def test_a_rank_that_ends_well_does_not_disturb_the_others() -> None:
    assert run_local(_leave, 3) == [6.0, 0.0, 0.0]
