"""One rank's failure ends all ranks at once, with its sentence, whatever the others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardwise import LostPeer, run_local
from shardwise.comm import Communicator, connecting

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


WAITS = list(_waits(Communicator(), Communicator()))


def _abort(what: str, reach: bool) -> tuple[str, float, str, float]:
    """What this rank is told, after how long, and the same of a call that comes later."""
    if not reach:
        connecting._offer = lambda listener: None
    comm = Communicator(timeout=60.0)
    comm.prepare([])
    lane = comm.in_lane("gradients")
    lane.prepare([EVERYBODY])
    comm.gather_objects(None)
    told = []
    start = time.monotonic()
    for later in (False, True):
        begin = time.monotonic()
        try:
            if later:
                comm.exchange([], [(1 - min(comm.rank, 1), torch.ones(3))]).wait()
            elif comm.rank == 1:
                time.sleep(0.3)
                comm.abort("conv1: the disk is full,\nreally")
            else:
                _waits(comm, lane)[what]()
            told += ["", 0.0]
        except (LostPeer, RuntimeError) as error:
            told += [str(error), time.monotonic() - begin]
    time.sleep(max(0.0, 1.0 - (time.monotonic() - start)))  # nobody dies before all are told
    return tuple(told)  # type: ignore[return-value]


SENTENCE = "rank 1 failed: conv1: the disk is full, really"


def _check(what: str, reach: bool) -> None:
    for rank, (first, waited, later, at_once) in enumerate(run_local(_abort, 3, what, reach)):
        if rank != 1:
            assert first == SENTENCE or what == "torch itself"
            assert 0 < waited < SOON
        assert later == SENTENCE and at_once < 0.1


@pytest.mark.parametrize("what", WAITS)
def test_an_abort_wakes_whoever_waits_for(what: str) -> None:
    _check(what, True)


@pytest.mark.parametrize("what", ["a message", "one that waits itself", "a ring", "an agreement"])
def test_an_abort_reaches_ranks_that_are_not_connected_waiting_for(what: str) -> None:
    _check(what, False)


def _fail_once_more() -> list[float]:
    """A world that failed, and a new one in the same processes."""
    comm = Communicator(timeout=20.0).in_lane("gradients")
    comm.prepare([(0, 1)])
    if comm.rank == 0:
        comm.abort("enough")
    with pytest.raises(LostPeer, match="rank 0 failed: enough"):
        comm.all_reduce((0, 1), torch.ones(LARGE), algorithm="ring").wait()
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    comm, x = Communicator().in_lane("gradients"), torch.ones(LARGE)
    comm.prepare([(0, 1)])
    comm.all_reduce((0, 1), x, algorithm="ring").wait()
    return [float(x.min()), float(x.max())]


def test_a_new_process_group_starts_afresh() -> None:
    assert run_local(_fail_once_more, 2) == [[2.0, 2.0]] * 2


def _leave() -> float:
    """Rank 1 ends well, long before the others have told each other all they have to say."""
    comm = Communicator(timeout=20.0)
    comm.prepare([])
    if comm.rank == 1:
        for line in connecting.present().alarm._peers:
            line.close()
        connecting.present().wires.close()
        return 0.0
    time.sleep(0.3)
    x = torch.ones(3)
    comm.exchange([(2 - comm.rank, x * comm.rank)], [(2 - comm.rank, x)]).wait()
    return float(x.sum())


def test_a_rank_that_ends_well_does_not_disturb_the_others() -> None:
    assert run_local(_leave, 3) == [6.0, 0.0, 0.0]
