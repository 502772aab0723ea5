"""Communicators of some ranks: in any order, one beside or within another, on any way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import About, Communicator, communicator
from shardwise.comm.world_state import world_state
from shardwise.errors import ShardwiseError
from worlds import reachable, run_cases

WORLD = 4
LARGE = 140_000  # numbers that gloo carries
SOON = 5.0  # seconds
ALGORITHMS = ("direct", "backend", "ring", "halving")


def _numbers(member: int, count: int) -> torch.Tensor:
    """Small integers, so that sums are exact."""
    return ((torch.arange(count) + 3 * member) % 8).double()


def _group(*members: int, timeout: float = 20.0) -> Communicator | None:
    """A communicator of these, in this order, which all ranks of the world ask for."""
    if members == tuple(range(dist.get_world_size())):
        return Communicator(timeout=timeout)
    group = dist.new_group(list(members), sort_ranks=False)
    return Communicator(group, timeout) if dist.get_rank() in members else None


def _wrong(comm: Communicator, ranks: tuple[int, ...], count: int) -> list[str]:
    """The collectives that do not give what they should."""
    me, members, found = comm.members()[comm.rank], comm.members(ranks), []
    mine, place = _numbers(me, count), ranks.index(comm.rank)
    every = [_numbers(member, count) for member in members]
    total = torch.stack(every).sum(0)
    parts = [torch.empty_like(mine) for _ in ranks]
    comm.all_gather(ranks, parts, mine).wait()
    if not all(map(torch.equal, parts, every)):
        found.append("gather")
    comm.reduce_scatter(ranks, y := torch.empty_like(mine), [mine + i for i in ranks]).wait()
    if not torch.equal(y, total + ranks[place] * len(ranks)):
        found.append("sum of parts")
    out, into = ([torch.empty(1 + place + i) for i, _ in enumerate(ranks)] for _ in range(2))
    comm.all_to_all(ranks, into, [x.fill_(me) for x in out]).wait()
    if [float(x[0]) for x in into] != list(members):
        found.append("exchange of parts")
    for algorithm in ALGORITHMS if comm.lane else ("direct", "backend"):
        comm.all_reduce(ranks, x := mine.clone(), algorithm=algorithm).wait()  # type: ignore[arg-type]
        if not torch.equal(x, total):
            found.append(f"{algorithm} sum")
    return found


def _talk(comm: Communicator | None, few: int) -> list[str]:
    """What goes wrong in a communicator, its subgroups and a lane of it."""
    if comm is None:
        return []
    everybody, found = tuple(range(comm.size)), []
    some = tuple({0, comm.size - 1})
    with mock.patch.object(communicator, "FEW", few):
        for own in (comm, comm.in_lane("gradients")) if comm.size > 1 else (comm,):
            own.prepare([everybody, some])
            for ranks in (everybody, some):
                for count in (5, LARGE):
                    found += _wrong(own, ranks, count) if comm.rank in ranks else []
    for root in everybody:
        comm.broadcast(x := _numbers(comm.members()[comm.rank], 9), root).wait()
        found += [] if torch.equal(x, _numbers(comm.members()[root], 9)) else ["broadcast"]
    if comm.gather_objects(dist.get_rank()) != list(comm.members()):
        found.append("objects")
    return found


def _alone(members: tuple[int, ...], few: int, reach: bool) -> list[str]:
    comm = _group(*members)
    with reachable(reach):
        return _talk(comm, few)


GROUPS = ((2, 3), (1, 3), (0, 1, 2), (3, 0, 2), (2,), (3, 2, 1, 0))


def test_a_group_of_some_ranks_talks_in_its_own_order_while_the_others_do_nothing() -> None:
    cases = [(members, few, few > 0) for members in GROUPS for few in (8, 0)]
    for case, ranks in zip(cases, run_cases(_alone, WORLD, cases), strict=True):
        assert ranks == [[]] * WORLD, case


def _several(members: list[tuple[int, ...]], reach: bool) -> list[str]:
    """Groups that overlap, in turns: those that share ranks share connections and numbers."""
    comms, found = [_group(*own) for own in members], []
    with reachable(reach):
        for few in (8, 0):
            for comm in comms:
                found += _talk(comm, few)
    dist.new_group([0, 2]), dist.barrier()  # torch's own groups are made as before
    return found


SEVERAL: tuple[list[tuple[int, ...]], ...] = (
    [(0, 1), (2, 3)],
    [(0, 3), (0, 1, 2, 3), (0, 3), (3, 1, 2, 0)],
    [(0, 1), (0, 1, 2), (1, 2, 3)],
    [(0, 1), (1, 0), (1, 2), (2, 3), (0, 3)],
)


def test_groups_side_by_side_nested_and_overlapping_do_not_disturb_each_other() -> None:
    cases = [(members, reach) for members in SEVERAL for reach in (True, False)]
    for case, ranks in zip(cases, run_cases(_several, WORLD, cases), strict=True):
        assert ranks == [[]] * WORLD, case


def _in_other_orders() -> list[str]:
    """Ranks 0 and 1 have made many groups when ranks 2 and 3 make their first."""
    first, second = _group(0, 1), _group(2, 3)
    found = _talk(first, 0) + _talk(first.in_lane("other") if first else None, 0)
    across = _group(1, 2)
    return found + _talk(across, 0) + _talk(second, 0)


def test_members_that_have_made_other_numbers_of_groups_meet() -> None:
    assert run_cases(_in_other_orders, WORLD, [()]) == [[[]] * WORLD]


def _connections(*groups: tuple[int, ...]) -> tuple[int, int]:
    for members in groups:
        if (comm := _group(*members)) is not None:
            comm.prepare([])
    return len(world_state().wires.known), len(world_state().alarm.lines)


def test_a_pair_of_ranks_is_connected_once_in_however_many_groups_it_is() -> None:
    (found,) = run_cases(_connections, WORLD, [((0, 1), (0, 1, 2), (1, 0))])
    assert found == [(2, 2), (2, 2), (2, 2), (0, 0)]


# -- failures --------------------------------------------------------------------------------------


def _said(action: Callable[[], object]) -> str:
    start = time.monotonic()
    with pytest.raises((ShardwiseError, RuntimeError)) as caught:
        action()
    assert time.monotonic() - start < SOON
    return str(caught.value)


def _abort(what: str, reach: bool) -> str:
    """Rank 3 fails; rank 2 waits for it, and ranks 0 and 1 are another group."""
    comms = [_group(0, 1), _group(2, 3)]
    comm: Any = comms[dist.get_rank() // 2]
    with reachable(reach):
        comm.prepare([])
    lane = comm.in_lane("gradients")
    lane.prepare([(0, 1)])
    if dist.get_rank() == 3:
        comm.abort("enough")
        return ""
    x, large = torch.ones(4), torch.ones(LARGE)
    waits: dict[str, Callable[[], object]] = {
        "a message": lambda: comm.exchange([], [(1, x)]).wait(),
        "a large sum": lambda: comm.all_reduce((0, 1), large).wait(),
        "a sum of gradients": lambda: lane.all_reduce((0, 1), large, algorithm="ring").wait(),
        "an agreement": lambda: comm.gather_objects(None),
    }
    if dist.get_rank() == 2:
        return _said(waits[what])
    for _ in range(20):
        comm.all_reduce((0, 1), x).wait()
        lane.all_reduce((0, 1), large).wait()
        time.sleep(0.01)
    return f"{float(x[0]):g}"


def test_a_failure_ends_its_group_and_no_other() -> None:
    waits = ("a message", "a large sum", "a sum of gradients", "an agreement")
    cases = [(what, reach) for what in waits for reach in (True, False)]
    for case, ranks in zip(cases, run_cases(_abort, WORLD, cases), strict=True):
        assert ranks == [f"{2.0**20:g}", f"{2.0**20:g}", "rank 3 failed: enough", ""], case


def _passed_on() -> str:
    comms = [_group(0, 1), _group(1, 2), _group(2, 3)]
    for comm in comms:
        if comm is not None:
            comm.prepare([])
    if dist.get_rank() == 0:
        time.sleep(0.1)
        comms[0].abort("enough")  # type: ignore[union-attr]
        return ""
    comm = comms[2] or comms[1]
    assert comm is not None
    return _said(lambda: comm.exchange([], [(1 - comm.rank, torch.ones(4))]).wait())


def test_a_failure_is_passed_on_to_groups_that_have_a_rank_in_common() -> None:
    assert run_cases(_passed_on, WORLD, [()]) == [["", *["rank 0 failed: enough"] * 3]]


def _early() -> str:
    """Rank 1 fails before its group is connected, and is connected with others already."""
    first, second = _group(0, 1), _group(1, 2)
    if first is not None:
        first.prepare([])
    if dist.get_rank() == 1:
        time.sleep(0.1)
        second.abort("enough")  # type: ignore[union-attr]
        return ""
    comm = first or second
    if comm is None:
        return ""
    return _said(lambda: comm.gather_objects(None))


def test_a_failure_before_a_group_is_connected_reaches_its_ranks() -> None:
    told = "rank 1 failed: enough"
    assert run_cases(_early, WORLD, [()]) == [[told, "", told, ""]]


def _waits_for_nobody() -> str:
    comm = _group(1, 3, timeout=0.5)
    if comm is None:
        return ""
    comm.prepare([(0, 1)])
    if comm.rank == 1:
        return ""
    return _said(lambda: comm.all_reduce((0, 1), torch.ones(3), About("numbers")).wait())


def test_ranks_are_named_by_their_numbers_among_all() -> None:
    ((_, sentence, _, _),) = run_cases(_waits_for_nobody, WORLD, [()])
    assert sentence.startswith("rank 1 waited in vain for rank 3 in the sum of numbers")


def _strangers() -> list[str]:
    some, found = dist.new_group([0, 1]), []
    mine = dist.get_rank() < 2
    for group in () if mine else (some,):
        found.append(_said(lambda group=group: Communicator(group)))
    found.append(_said(lambda: Communicator([0, 1])))
    if mine:
        dist.destroy_process_group(some)
        found.append(_said(lambda: Communicator(some)))
    return found


def test_who_is_not_in_a_group_and_what_is_no_group_is_refused() -> None:
    ((first, _, _, last),) = run_cases(_strangers, WORLD, [()])
    assert last[0].startswith("rank 3 is not in the group") and "leave it alone" in last[0]
    assert first[0] == last[1] and "group=[0, 1] must be a process group" in first[0]
    assert "has been destroyed" in first[1]
