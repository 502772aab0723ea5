"""A world of threads: what its ranks say to each other, and what becomes of ranks that disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise.comm import About, Communicator
from shardwise.comm.in_process import Hung, Mismatch, World
from shardwise.errors import LostPeer
from shardwise.model.capture import capture
from shardwise.plans.plan import Plan
from shardwise.verify import compare


def test_collectives_are_those_of_a_real_world() -> None:
    def work(comm: Communicator) -> Any:
        everybody, x = tuple(range(comm.size)), torch.arange(4.0) * (comm.rank + 1)
        total = x.clone()
        comm.all_reduce(everybody, total).wait()
        parts = [torch.empty(4) for _ in everybody]
        comm.all_gather(everybody, parts, x).wait()
        mine = torch.empty(2)
        comm.reduce_scatter(everybody, mine, [torch.full((2,), float(r)) for r in everybody]).wait()
        arrived = [torch.empty(1) for _ in everybody]
        outgoing = [torch.tensor([10.0 * comm.rank + r]) for r in everybody]
        comm.all_to_all(everybody, arrived, outgoing).wait()
        root = x.clone()
        comm.broadcast(root, 1).wait()
        others = [float(t) for r, t in enumerate(arrived) if r != comm.rank]
        return total.tolist(), [p[1].item() for p in parts], mine.tolist(), others, root.tolist()

    for seed in range(20):
        for rank, found in enumerate(World(3, seed).run(work)):
            total, gathered, mine, exchanged, root = found
            assert total == [0.0, 6.0, 12.0, 18.0] and gathered == [1.0, 2.0, 3.0]
            assert mine == [3.0 * rank] * 2 and root == [0.0, 2.0, 4.0, 6.0]
            assert exchanged == [10.0 * r + rank for r in range(3) if r != rank]


def test_the_same_seed_gives_the_same_order_of_events_and_another_one_another() -> None:
    def order(seed: int) -> list[int]:
        events: list[int] = []

        def work(comm: Communicator) -> None:
            for _ in range(5):
                events.append(comm.rank)
                comm.all_reduce((0, 1, 2, 3), torch.ones(1)).wait()

        World(4, seed).run(work)
        return events

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(8)}) > 4


def test_every_rank_has_random_numbers_to_itself() -> None:
    def work(comm: Communicator) -> list[float]:
        torch.manual_seed(7)
        found = []
        for _ in range(4):
            found.append(torch.rand(()).item())
            comm.gather_objects(None)
        return found

    before = torch.get_rng_state()
    first, *others = World(3, seed=5).run(work)
    assert len(set(first)) == 4 and all(other == first for other in others)
    assert torch.equal(before, torch.get_rng_state())


def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    def work(comm: Communicator) -> None:
        peer = 1 - comm.rank
        comm.exchange([], [(peer, torch.empty(2))], About("conv1")).wait()

    with pytest.raises(Hung, match=r"rank 0 waits for message 0 of rank 1, 2 x float32 .*conv1"):
        World(2).run(work)


def test_a_rank_that_ends_early_is_waited_for_by_nobody() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank:
            comm.gather_objects(1)

    with pytest.raises(Hung, match="rank 1 waits for message 0 of rank 0"):
        World(2).run(work)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "theirs, about",
    [
        (torch.empty(3), "a"),
        (torch.empty(2, dtype=torch.int32), "a"),
        (torch.empty(2), "b"),
    ],
)
def test_a_message_of_another_size_type_or_purpose_names_both_sides(
    theirs: torch.Tensor, about: str, seed: int
) -> None:
    def work(comm: Communicator) -> None:
        x, name = (torch.zeros(2), "a") if comm.rank else (theirs, about)
        comm.exchange([(1 - comm.rank, x)], [(1 - comm.rank, x.clone())], About(name)).wait()

    with pytest.raises(Mismatch, match=r"rank \d sent .* where rank \d awaits .*the same"):
        World(2, seed).run(work)


def test_an_exception_on_one_rank_ends_all_with_its_sentence() -> None:
    seen: list[str] = []

    def work(comm: Communicator) -> None:
        try:
            if comm.rank == 1:
                raise ValueError("no more paper")
            comm.gather_objects(None)
        except LostPeer as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="no more paper"):
        World(3).run(work)
    assert seen == ["rank 1 failed: no more paper"] * 2


def test_memory_that_is_sent_must_be_left_alone_and_read_only_after_the_wait() -> None:
    def careless(comm: Communicator) -> float:
        x, y = torch.ones(1), torch.empty(1)
        pending = comm.exchange([(1 - comm.rank, x)], [(1 - comm.rank, y)])
        x.fill_(5.0)
        early = y.item()
        pending.wait()
        assert early != early  # not a number
        return y.item()

    found = {value for seed in range(20) for value in World(2, seed).run(careless)}
    assert found == {1.0, 5.0}


def test_a_model_is_compared_with_one_device_under_any_order_of_arrivals() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3)
    )
    net, x = seeded(net), seeded_input((4, 3, 9, 7))
    graph = capture(net, x)
    for seed in range(6):
        plan = Plan.random(graph, 3, seed)
        found = World(3, seed).run(
            lambda comm, plan=plan: compare(
                net, plan, (x,), comm, 2, graphs=lambda training, batch: graph
            )
        )
        assert found[0] and all(c.passed for c in found[0])
