"""All-reduce schedules, carried out on arrays: exact sums, the same bits, the modelled traffic."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from message_times import message_seconds
from shardwise.cluster.cluster import Cluster, Device, Link
from shardwise.cluster.schedules import ALGORITHMS, Switches, parts, schedule
from shardwise.planner.links import Network
from shardwise.planner.sum_costs import Ring

TOPOLOGIES: list[Switches] = [
    *[(tuple(range(world)),) for world in range(1, 18)],
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)),
    ((0, 1, 2, 3), (4, 5, 6)),
    ((0,), (1, 2, 3, 4, 5), (6, 7)),
    ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (10, 11, 12, 13, 14), (15, 16)),
    ((3, 9), (11, 20, 21)),  # a segment: some ranks of a larger world
]


def name(switches: Switches) -> str:
    return "+".join(str(len(members)) for members in switches)


def carry_out(algorithm: str, switches: Switches, vectors: dict[int, np.ndarray]) -> None:
    """Runs every rank's rounds; a message is read only when it arrives, as late as a send may be.

    So a part that was sent must stay as it is until its receiver has it.
    """
    todo = {
        rank: deque(schedule(algorithm, switches, rank, len(vector)))
        for rank, vector in vectors.items()
    }
    flying: dict[tuple[int, int], deque[tuple[int, int]]] = {}
    started = dict.fromkeys(todo, False)
    while any(todo.values()):
        before = sum(map(len, todo.values())), sum(started.values())
        for rank, rounds in todo.items():
            if rounds and not started[rank]:
                started[rank] = True
                for message in rounds[0].sends:
                    span = (message.start, message.stop)
                    flying.setdefault((rank, message.peer), deque()).append(span)
        for rank, rounds in todo.items():
            if rounds and all(flying.get((m.peer, rank)) for m in rounds[0].receives):
                one = rounds.popleft()
                started[rank] = False
                for message in one.receives:
                    span = flying[message.peer, rank].popleft()
                    assert span == (message.start, message.stop)
                    arrived, own = vectors[message.peer][slice(*span)], vectors[rank]
                    own[slice(*span)] = own[slice(*span)] + arrived if one.adds else arrived
        assert before != (sum(map(len, todo.values())), sum(started.values())), "ranks wait forever"
    assert not any(flying.values())


@pytest.mark.parametrize("switches", TOPOLOGIES, ids=name)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("numel", [0, 1, 5, 64, 1001])
def test_every_rank_gets_the_sum_to_the_same_bits(
    algorithm: str, switches: Switches, numel: int
) -> None:
    ranks, draw = [r for members in switches for r in members], np.random.default_rng(3)
    exact = {r: draw.integers(-1000, 1000, numel).astype(np.float64) for r in ranks}
    rough = {r: draw.normal(size=numel).astype(np.float32) for r in ranks}
    wanted = [np.sum(list(vectors.values()), axis=0) for vectors in (exact, rough)]
    for vectors in (exact, rough):
        carry_out(algorithm, switches, vectors)
        assert all(np.array_equal(vector, vectors[ranks[0]]) for vector in vectors.values())
    assert np.array_equal(exact[ranks[0]], wanted[0])  # integers: no rounding in any order
    assert np.allclose(rough[ranks[0]], wanted[1], atol=1e-4)


@pytest.mark.parametrize("world", range(1, 18))
def test_halving_takes_two_rounds_per_doubling_of_the_ranks(world: int) -> None:
    rounds = max(len(schedule("halving", (tuple(range(world)),), r, 999)) for r in range(world))
    assert rounds == 2 * (world - 1).bit_length()


@pytest.mark.parametrize("world", range(2, 18))
def test_a_reduce_scatter_leaves_every_rank_its_part(world: int) -> None:
    switches = (tuple(range(world)),)
    for algorithm in ("ring", "halving"):
        for rank in range(world):
            rounds = schedule(algorithm, switches, rank, 17 * world)
            (*_, last) = (one for one in rounds if one.adds)
            wanted = parts((0, 17 * world), world)[rank].tolist()
            assert [[m.start, m.stop] for m in last.receives[:1]] in ([wanted], [])


# -- traffic ---------------------------------------------------------------------------------------


def two_switches(num_switches: int, per_switch: int) -> Network:
    """P5's machine: the ranks of a switch share an uplink as fast as one port."""
    device = Device(flops=1e12, memory_bandwidth=1e11, memory=1 << 30)
    inner = Link(name="switch", count=per_switch, latency=1e-4, bandwidth=1e9)
    outer = Link(name="uplink", count=num_switches, latency=3e-4, bandwidth=1e9)
    return Network(Cluster(name="two", device=device, links=(inner, outer)))


def byte_seconds(network: Network, algorithm: str, switches: Switches, numel: int) -> float:
    """The time of the bytes of the schedules' rounds, in step; a number is a byte."""
    quick = [link.model_copy(update={"latency": 0.0}) for link in network.cluster.links]
    network = Network(network.cluster.model_copy(update={"links": tuple(quick)}))
    rounds = [schedule(algorithm, switches, rank, numel) for rank in range(network.world)]
    total = 0.0
    for turn in zip(*rounds, strict=True):
        matrix = np.zeros((network.world, network.world))
        for rank, one in enumerate(turn):
            for message in one.sends:
                matrix[rank, message.peer] += message.stop - message.start
        total += message_seconds(network, matrix)
    return total


def latency(network: Network, algorithm: str, switches: Switches, numel: int) -> float:
    """When the last rank ends if bytes take no time: a rank waits only for what it receives."""
    rounds = [schedule(algorithm, switches, rank, numel) for rank in range(network.world)]
    now = [0.0] * network.world
    for turn in zip(*rounds, strict=True):
        before = tuple(now)
        for rank, one in enumerate(turn):
            for message in one.receives:
                crossed = [lv for lv in network.levels if lv.units[message.peer] != lv.units[rank]]
                arrives = before[message.peer] + crossed[-1].link.latency
                now[rank] = max(now[rank], arrives)
    return max(now)


@pytest.mark.parametrize(("num_switches", "per_switch"), [(2, 4), (4, 2), (4, 4), (2, 16)])
def test_the_schedules_take_the_time_that_the_network_predicts(
    num_switches: int, per_switch: int
) -> None:
    network, world = two_switches(num_switches, per_switch), num_switches * per_switch
    switches = tuple(
        tuple(range(first, first + per_switch)) for first in range(0, world, per_switch)
    )
    whole = Ring.of(np.zeros(world, dtype=np.int64))
    assert whole is not None
    models = network.schedules(whole)
    assert models.keys() == ALGORITHMS.keys()
    numel = 1 << 20
    for algorithm, model in models.items():
        fixed, per_byte = model
        assert latency(network, algorithm, switches, numel) == pytest.approx(fixed), algorithm
        taken = byte_seconds(network, algorithm, switches, numel)
        assert taken == pytest.approx(per_byte * numel), algorithm


def test_round_robin_halving_sends_p5s_share_over_the_uplinks() -> None:
    switches = ((0, 1, 2, 3), (4, 5, 6, 7))

    def crossing(algorithm: str) -> int:
        return sum(
            message.stop - message.start
            for rank in range(4)
            for one in schedule(algorithm, switches, rank, 800)
            for message in one.sends
            if message.peer >= 4
        )

    assert crossing("halving") == 2 * 4 * 400  # (p - q) n / p per rank, in each direction
    assert crossing("round-robin") == crossing("two-level") == 2 * 4 * 100  # (p / q - 1) n / p
