"""SumRules by schedules over real messages: exact, in order, traced, and a lost peer is named."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from pool import shared_pool
from shardwise import Plan, capture, parallelize
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.measured_sums import Algorithm, Winner
from shardwise.cluster.schedules import ALGORITHMS
from shardwise.comm import About, Communicator, SumRules
from shardwise.comm.summing import CHUNK
from shardwise.errors import LostPeer

TWO_SWITCHES = Cluster.load("2x2@1Gb/4:1")
ABOUT = About("the gradients of fc", "gradients")


def lane_of(switches: tuple[int, ...], groups: list[tuple[int, ...]]) -> Communicator:
    comm = Communicator(timeout=20.0).in_lane("sums")
    comm.sums = SumRules(switches)
    comm.prepare(groups)
    return comm


def own(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) % 101 + rank).to(dtype)


def sums(algorithm: Algorithm, switches: tuple[int, ...], numel: int, dtype: torch.dtype) -> bool:
    everybody = tuple(range(len(switches)))
    comm = lane_of(switches, [everybody])
    x = own(comm.rank, numel, dtype)
    comm.all_reduce(everybody, x, algorithm=algorithm).wait()
    return torch.equal(x, sum(own(rank, numel, dtype) for rank in everybody))  # type: ignore[arg-type]


@pytest.mark.parametrize("switches", [(0, 0), (0, 1, 1), (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "direct", "backend"])
def test_every_algorithm_sums_exactly(algorithm: Algorithm, switches: tuple[int, ...]) -> None:
    pool = shared_pool(len(switches))
    several_chunks = 3 * CHUNK // 4 * len(switches) + 5
    for numel, dtype in ((1, torch.float32), (1001, torch.float64), (several_chunks, torch.int32)):
        assert all(pool.run(sums, algorithm, switches, numel, dtype)), (numel, dtype)


def many_at_once() -> list[float]:
    """Segments beside sums of all, started in the same order everywhere, waited for in another."""
    pairs, everybody = [(0, 1), (2, 3), (0, 2), (1, 3)], (0, 1, 2, 3)
    comm = lane_of((0, 0, 1, 1), [*pairs, everybody])
    started, vectors = [], []
    for _ in range(5):
        for ranks in [*pairs, everybody]:
            if comm.rank in ranks:
                vectors.append(torch.full((5000,), float(comm.rank)))
                started.append(comm.all_reduce(ranks, vectors[-1], algorithm="halving"))
    Communicator().gather_objects(None)  # messages of another process group do not disturb
    for pending in reversed(started):
        pending.wait()
    return [float(v[0]) if bool((v == v[0]).all()) else -1.0 for v in vectors]


def test_sums_of_many_groups_are_carried_out_in_order() -> None:
    found = shared_pool(4).run(many_at_once)
    assert found == [[1, 2, 6] * 5, [1, 4, 6] * 5, [5, 2, 6] * 5, [5, 4, 6] * 5]


def traced() -> list[tuple[str, str, str, bool]]:
    comm = lane_of((0, 0), [(0, 1)])
    comm.timeline.begin()
    pending = comm.all_reduce((0, 1), torch.ones(100_000), ABOUT, "ring")
    time.sleep(0.3)
    pending.wait()
    (event,) = comm.timeline.end()
    hidden = event.end - event.start < 0.25 and event.blocked is not None and event.blocked < 0.1
    return [(event.name, event.kind, event.lane, hidden)]


def test_a_trace_shows_when_the_sum_was_done_not_when_it_was_waited_for() -> None:
    for found in shared_pool(2).run(traced):
        assert found == [("the gradients of fc", "gradients", "gradients", True)]


def lost() -> str:
    """Rank 2 does not take part."""
    comm = Communicator(timeout=2.0).in_lane("lost")
    comm.prepare([(0, 1, 2)])
    if comm.rank == 2:
        return ""
    try:
        comm.all_reduce((0, 1, 2), torch.ones(10), ABOUT, "ring").wait()
    except LostPeer as error:
        return str(error)
    return "no error"


def test_the_peer_that_does_not_come_is_named() -> None:
    first, second, _ = shared_pool(3).run(lost)
    for sentence in (first, second):  # its own, or that of the other, which came first
        assert "waited in vain for rank" in sentence
    assert "waited in vain for rank 2 in the sum of the gradients of fc" in first


# -- training --------------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 10))


def trained(cluster: Cluster | None) -> list[torch.Tensor]:
    graph = capture(net(), torch.zeros(8, 3, 8, 8))
    model = parallelize(seeded(net()), Plan.uniform(graph, n=4), cluster=cluster)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(seeded_input((8, 3, 8, 8))).square().mean().backward()
        optimizer.step()
    return list(model.full_tensors().values())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_with_each_algorithm_gives_the_same_weights(algorithm: Algorithm) -> None:
    winner = Winner(ranks=4, switches=2, bytes=1000, algorithm=algorithm, seconds=1e-3)
    tuned = TWO_SWITCHES.model_copy(update={"sums": (winner,)})
    plain, found = (shared_pool(4).run(trained, cluster) for cluster in (None, tuned))
    for ours, theirs in zip(found[0], plain[0], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)
    for rank in found[1:]:
        assert all(map(torch.equal, rank, found[0]))
