"""How long messages and sums take on a cluster's links, against times worked out by hand."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from message_times import message_seconds
from shardwise.cluster.cluster import Cluster, Device, Link
from shardwise.cluster.measured_sums import Schedule, Winner
from shardwise.planner.links import Network, PortQueues
from shardwise.planner.sum_costs import Ring, SumCosts, SumModel

DEVICE = Device(flops=1e12, memory_bandwidth=1e11, memory=1 << 30)
MB = 1e6


def link(name: str = "switch", **fields: object) -> Link:
    """One level with round numbers: 1 MB takes 1 ms at 1 GB/s."""
    return Link.model_validate({"name": name, "latency": 0.0, "bandwidth": 1e9} | fields)


def network(*links: Link, workers: int | None = None) -> Network:
    return Network(Cluster(name="round", device=DEVICE, links=links, workers=workers))


def matrix(world: int, *messages: tuple[int, int, float]) -> np.ndarray:
    """Bytes from rank r to rank q, from (r, q, bytes)."""
    found = np.zeros((world, world))
    for source, target, nbytes in messages:
        found[source, target] = nbytes
    return found


def one_segment(world: int) -> np.ndarray:
    return np.zeros(world, dtype=np.int64)


def taken(network: Network, segments: np.ndarray) -> dict[Schedule, tuple[float, float]]:
    """The latency and the time per byte of every schedule that applies."""
    ring = Ring.of(segments)
    assert ring is not None
    return network.schedules(ring)


def model(network: Network, segments: np.ndarray) -> SumModel:
    return network.sum_models[network.sum_model(segments)]


def scatter_seconds(network: Network, segments: np.ndarray, nbytes: float) -> float:
    return float(model(network, segments).scatter_seconds(np.array(nbytes)))


def sum_bytes(network: Network, segments: np.ndarray, nbytes: float) -> float:
    return float(model(network, segments).bytes(np.array(nbytes)))


# -- ports that differ -----------------------------------------------------------------------------


def test_the_slowest_port_that_is_used_decides() -> None:
    unequal = network(link(bandwidths=(1e9, 1e9, 2.5e8)), workers=3)
    near, far = matrix(3, (0, 1, MB)), matrix(3, (0, 2, MB))
    assert PortQueues(unequal).carry(near, np.zeros(3)).tolist() == pytest.approx([0, 1e-3, 0])
    assert PortQueues(unequal).carry(far, np.zeros(3)).tolist() == pytest.approx([0, 0, 4e-3])
    alike = network(link(bandwidth=2.5e8), workers=3)
    everybody = one_segment(3)
    assert unequal.sum_seconds(everybody, MB) == pytest.approx(alike.sum_seconds(everybody, MB))
    pair = np.array([0, 0, -1])
    assert unequal.sum_seconds(pair, MB) == pytest.approx(alike.sum_seconds(pair, MB) / 4)


# -- messages --------------------------------------------------------------------------------------


def test_on_a_flat_switch_the_busiest_port_counts() -> None:
    flat = network(link(count=4, latency=1e-4))
    assert message_seconds(flat, matrix(4, (0, 1, MB))) == pytest.approx(1e-4 + 1e-3)
    pair = matrix(4, (0, 1, MB), (2, 3, MB))  # other ports, so at the same time
    assert message_seconds(flat, pair) == pytest.approx(1e-4 + 1e-3)
    both_ways = matrix(4, (0, 1, MB), (1, 0, MB))  # a port sends and receives at once
    assert message_seconds(flat, both_ways) == pytest.approx(1e-4 + 1e-3)
    fan_out = matrix(4, (0, 1, MB), (0, 2, 2 * MB), (0, 3, 3 * MB))
    assert message_seconds(flat, fan_out) == pytest.approx(3 * 1e-4 + 6e-3)
    assert message_seconds(flat, fan_out.T) == pytest.approx(3 * 1e-4 + 6e-3)


def test_nothing_sent_takes_no_time() -> None:
    assert message_seconds(network(link(count=4, latency=1.0)), np.zeros((4, 4))) == 0.0


def test_an_oversubscribed_uplink_is_shared_by_the_ranks_behind_it() -> None:
    # Two switches of two hosts; the uplink of two 1 GB/s ports is oversubscribed 4:1: 0.5 GB/s.
    uplink = link("uplink", count=2, latency=3e-4, bandwidth=2e9, oversubscription=4)
    two = network(link(count=2, latency=1e-4), uplink)
    assert message_seconds(two, matrix(4, (0, 1, MB))) == pytest.approx(1e-4 + 1e-3)
    assert message_seconds(two, matrix(4, (0, 2, MB))) == pytest.approx(3e-4 + 2e-3)
    across = matrix(4, (0, 2, MB), (1, 3, MB))  # both leave the first switch
    assert message_seconds(two, across) == pytest.approx(3e-4 + 4e-3)
    opposite = matrix(4, (0, 2, MB), (3, 1, MB))  # one leaves it, one enters it
    assert message_seconds(two, opposite) == pytest.approx(3e-4 + 2e-3)
    mostly_inside = matrix(4, (0, 1, 9 * MB), (0, 2, MB))  # the host's port is busier
    assert message_seconds(two, mostly_inside) == pytest.approx(2 * 3e-4 + 10e-3)


def test_on_a_shared_medium_all_messages_take_turns() -> None:
    bus = network(link("bus", count=4, latency=1e-4, shared=True))
    pair = matrix(4, (0, 1, MB), (2, 3, 2 * MB))
    assert message_seconds(bus, pair) == pytest.approx(1e-4 + 3e-3)


def test_two_groups_have_a_shared_medium_each() -> None:
    buses = network(link("bus", count=2, shared=True), link("uplink", count=2))
    pair = matrix(4, (0, 1, MB), (2, 3, 2 * MB))
    assert message_seconds(buses, pair) == pytest.approx(2e-3)


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_ring_takes_its_textbook_time(world: int) -> None:
    alpha, beta, nbytes = 1e-4, 1e-9, 4 * MB
    flat = network(link(count=world, latency=alpha))
    fixed, per_byte = taken(flat, one_segment(world))["ring"]
    expected = 2 * (world - 1) * (alpha + nbytes / world * beta)
    assert fixed + per_byte * nbytes == pytest.approx(expected)
    assert flat.sum_seconds(one_segment(world), nbytes) <= expected * (1 + 1e-12)
    if world & (world - 1):  # no halving, and one level only: the ring is all there is
        assert flat.sum_seconds(one_segment(world), nbytes) == pytest.approx(expected)


def supernodes(p: int, q: int, alpha: float, beta1: float, beta2: float) -> Network:
    """P5's machine: p nodes in supernodes of q; between them each node has 1 / beta2."""
    central = link(
        "central",
        latency=alpha,
        bandwidth=q / beta1,
        oversubscription=beta2 / beta1,
        count=max(1, p // q),
    )
    return network(link("supernode", count=q, latency=alpha, bandwidth=1 / beta1), central)


@pytest.mark.parametrize(("p", "q"), [(8, 2), (8, 4), (16, 4), (64, 16), (1024, 256)])
def test_halving_with_near_or_far_partners_first_is_p5s_formula(p: int, q: int) -> None:
    alpha, beta1, beta2, n = 2e-6, 1 / 12e9, 4 / 12e9, 100 * MB
    machine = supernodes(p, q, alpha, beta1, beta2)
    models = taken(machine, one_segment(p))
    # P5, section 5.1, without the time of the additions: a reduce-scatter and as long an allgather.
    near = log2(p) * alpha + (p - p / q) * beta1 * n / p + (p / q - 1) * beta2 * n / p
    far = log2(p) * alpha + (q - 1) * beta1 * n / p + (p - q) * beta2 * n / p
    for name, expected in (("round-robin", 2 * near), ("halving", 2 * far)):
        assert models[name][0] + models[name][1] * n == pytest.approx(expected)
        assert machine.sum_seconds(one_segment(p), n) <= expected * (1 + 1e-12)
    assert near < far


def test_small_sums_are_halved_since_a_ring_has_more_steps() -> None:
    p, alpha = 64, 1e-4
    machine = supernodes(p, 16, alpha, 1e-9, 4e-9)
    assert machine.sum_seconds(one_segment(p), 0.0) == pytest.approx(2 * log2(p) * alpha)


def test_two_levels_of_rings_are_the_ring_inside_and_the_ring_across() -> None:
    p, q, alpha, beta1, beta2, n = 12, 4, 1e-4, 1e-9, 4e-9, 8 * MB
    model = taken(supernodes(p, q, alpha, beta1, beta2), one_segment(p))["two-level"]
    inside = 2 * (q - 1) * (alpha + n / q * beta1)
    across = 2 * (p // q - 1) * (alpha + n / q / (p // q) * beta2)
    assert model[0] + model[1] * n == pytest.approx(inside + across)


def test_the_best_algorithm_counts() -> None:
    machine, segments = supernodes(8, 4, 1e-5, 1e-9, 4e-9), one_segment(8)
    models = taken(machine, segments)
    assert len(models) == 4
    winners = set()
    for nbytes in (0.0, 1e3, 1e5, 1e7, 1e9):
        times = [fixed + per_byte * nbytes for fixed, per_byte in models.values()]
        assert machine.sum_seconds(segments, nbytes) == pytest.approx(min(times))
        winners.add(int(np.argmin(times)))
    assert len(winners) > 1


def test_the_latency_of_a_ring_adds_up_hop_by_hop() -> None:
    hosts = network(link(count=4, latency=1e-5), link("uplink", count=3, latency=1e-3))
    around = 9 * 1e-5 + 3 * 1e-3  # three hops inside each host, and one to the next
    assert taken(hosts, one_segment(12))["ring"][0] == pytest.approx(
        2 * (around - 1e-5)
    )  # one is not needed


def test_the_slowest_of_several_rings_counts() -> None:
    hosts = network(link(count=2, latency=1e-5), link("uplink", count=3, latency=1e-3))
    segments = np.array([0, 0, 1, 2, 1, 2])  # one inside a host, two across
    assert taken(hosts, segments)["ring"][0] == pytest.approx(2 * 1 / 2 * 2 * 1e-3)


@pytest.mark.parametrize("schedule", ["ring", "halving", "round-robin", "two-level"])
def test_a_cluster_may_have_one_way_to_sum(schedule: Schedule) -> None:
    free, segments = supernodes(8, 4, 1e-5, 1e-9, 4e-9), one_segment(8)
    only = Network(free.cluster.model_copy(update={"schedules": (schedule,)}))
    fixed, per_byte = taken(free, segments)[schedule]
    assert only.sum_seconds(segments, MB) == pytest.approx(fixed + per_byte * MB)


def test_near_partners_come_first_on_every_level() -> None:
    rates = (8e9, 4e9, 1e9)
    three = network(*(link(f"level{i}", count=2, bandwidth=rate) for i, rate in enumerate(rates)))
    # One rank sends 1/2 to its neighbour, two 1/4 each over their port, then four 1/8 each.
    expected = 2 * sum(0.5 / rate for rate in rates)
    assert taken(three, one_segment(8))["round-robin"][1] == pytest.approx(expected)


def test_a_small_ring_ends_early_and_leaves_its_ports_to_others() -> None:
    hosts = network(link("bus", count=2, bandwidth=1e15), link("ethernet", count=3))
    segments = np.array([0, 1, 0, 1, -1, 1])  # both leave the first host; the second once more
    expected = 2 * ((1 / 2 + 1 / 3) + 1 / 3) * MB / 1e9
    assert hosts.sum_seconds(segments, MB) == pytest.approx(expected)


def test_where_the_only_way_to_sum_does_not_apply_there_is_the_ring() -> None:
    flat = network(link(count=6, latency=1e-4))
    only = Network(flat.cluster.model_copy(update={"schedules": ("halving",)}))
    expected = 2 * 5 * (1e-4 + MB / 6 / 1e9)
    assert only.sum_seconds(one_segment(6), MB) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["ring", "halving", "two-level"])
def test_additions_take_time_in_every_sum(schedule: str) -> None:
    free = supernodes(8, 4, 1e-5, 1e-9, 4e-9).cluster.model_copy(update={"schedules": (schedule,)})
    slow = free.model_copy(update={"device": DEVICE.model_copy(update={"adding": 2e9})})
    times = [Network(c).sum_seconds(one_segment(8), MB) for c in (free, slow)]
    assert times[1] - times[0] == pytest.approx(7 / 8 * MB / 2e9)  # P5: (p - 1) / p of n


def test_a_host_adds_every_copy_of_a_staged_sum() -> None:
    host = link("host", count=4, shared=True, staged=True, bandwidth=2e9, adding=1e9)
    expected = 2 * 4 * MB / 2e9 + 4 * MB / 1e9
    assert network(host).sum_seconds(one_segment(4), MB) == pytest.approx(expected)
    nodes = [link("pcie", count=2, staged=True), link("net", count=2, staged=True, adding=5e8)]
    expected = 2 * 2 * MB / 1e9 + 2 * MB / 5e8  # two ranks behind the port of each node
    assert network(*nodes).sum_seconds(one_segment(4), MB) == pytest.approx(expected)


def test_a_measured_sum_is_believed() -> None:
    measured = link(count=4, latency=1.0, sum_latency=2e-3, sum_bandwidth=5e8)
    segments = one_segment(4)
    expected = 2e-3 + 2 * 3 / 4 * MB / 5e8
    assert network(measured).sum_seconds(segments, MB) == pytest.approx(expected)


def test_a_measured_sum_of_the_uplink_is_used_only_by_segments_that_cross_it() -> None:
    uplink = link("uplink", count=2, sum_latency=7.0, sum_bandwidth=1e9)
    two = network(link(count=2, latency=1e-4), uplink)
    inside = np.array([0, 0, 1, 1])
    assert two.sum_seconds(inside, MB) == pytest.approx(2 * (1e-4 + 0.5e-3))
    assert two.sum_seconds(one_segment(4), MB) == pytest.approx(7.0 + 2 * 3 / 4 * 1e-3)


def test_a_staged_sum_sends_and_fetches_every_copy_over_the_medium() -> None:
    host = link("host", count=4, shared=True, staged=True, bandwidth=2e9)
    assert network(host).sum_seconds(one_segment(4), MB) == pytest.approx(2 * 4 * MB / 2e9)
    assert sum_bytes(network(host), one_segment(4), MB) == pytest.approx(2 * 4 * MB)


@pytest.mark.parametrize("segments", [[0, 1, 2, 3], [-1, -1, -1, -1], [-1, 5, -1, -1]])
def test_a_segment_of_one_rank_costs_nothing(segments: list[int]) -> None:
    flat = network(link(count=4, latency=1.0))
    for measure in (Network.sum_seconds, scatter_seconds, sum_bytes):
        assert measure(flat, np.array(segments), MB) == 0.0


def test_one_worker_has_nothing_to_sum() -> None:
    alone = network(link(latency=1.0))
    assert alone.world == 1
    assert alone.sum_seconds(one_segment(1), MB) == 0.0
    assert message_seconds(alone, np.zeros((1, 1))) == 0.0


def test_disjoint_segments_at_once_share_the_port_of_their_host() -> None:
    # Two hosts of two workers; a host has one 1 GB/s port, workers inside talk at 10 GB/s.
    hosts = network(link("bus", count=2, bandwidth=1e10), link("ethernet", count=2))
    alone = np.array([0, -1, 0, -1])  # workers 0 and 2: each host's port sends one copy
    assert hosts.sum_seconds(alone, MB) == pytest.approx(2 * 0.5 * MB / 1e9)
    crossing = np.array([0, 1, 0, 1])  # two such pairs, and each port serves both
    assert hosts.sum_seconds(crossing, MB) == pytest.approx(2 * 2 * 0.5 * MB / 1e9)
    inside = np.array([0, 0, 2, 2])  # pairs that stay in their hosts do not disturb each other
    assert hosts.sum_seconds(inside, MB) == pytest.approx(2 * 0.5 * MB / 1e10)


def test_the_bytes_of_a_sum_are_two_blocks_per_rank_less_the_own_part() -> None:
    flat = network(link(count=6))
    assert sum_bytes(flat, one_segment(6), 6 * MB) == pytest.approx(6 * 2 * 5 * MB)
    pairs = np.array([0, 0, 2, 2, -1, -1])
    assert sum_bytes(flat, pairs, 6 * MB) == pytest.approx(4 * 2 * 3 * MB)


# -- reduce-scatter and all-gather -----------------------------------------------------------------


def test_a_scatter_sends_all_but_the_own_part() -> None:
    flat = network(link(count=4, latency=1e-4))
    assert scatter_seconds(flat, one_segment(4), MB) == pytest.approx(3 * 1e-4 + 0.75 * MB / 1e9)


def test_a_scatter_across_hosts_waits_for_the_busier_of_port_and_uplink() -> None:
    # Each of a host's two workers sends half of its block to the other host.
    slow = link("ethernet", count=2, latency=3e-4)
    hosts = network(link("bus", count=2, latency=1e-4, bandwidth=1e10), slow)
    expected = 3 * 3e-4 + 2 * 0.5 * MB / 1e9
    assert scatter_seconds(hosts, one_segment(4), MB) == pytest.approx(expected)
    fast = link("fabric", count=2, latency=3e-4, bandwidth=1e12)
    hosts = network(link("bus", count=2, latency=1e-4, bandwidth=1e10), fast)
    expected = 3 * 3e-4 + 0.75 * MB / 1e10  # now a worker's own port is the busiest
    assert scatter_seconds(hosts, one_segment(4), MB) == pytest.approx(expected)


def test_without_latency_a_sum_takes_as_long_as_two_scatters() -> None:
    flat = network(link(count=8))
    scatter = scatter_seconds(flat, one_segment(8), MB)
    assert flat.sum_seconds(one_segment(8), MB) == pytest.approx(2 * scatter)


MIXED = [0, 0, 1, 1, 1, 1, -1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("segments", [[0] * 12, [0, 1, 2] * 4, MIXED])
def test_a_scatter_takes_what_its_messages_take(segments: list[int]) -> None:
    uplink = link("uplink", count=3, latency=3e-4, bandwidth=2e9, oversubscription=4)
    two, of = network(link(count=4, latency=1e-4), uplink), np.array(segments)
    sizes = np.bincount(of[of >= 0])[of]
    everybody = (of[:, None] == of) & (of >= 0) & ~np.eye(12, dtype=bool)
    messages = np.where(everybody, MB / sizes, 0.0)
    assert scatter_seconds(two, of, MB) == pytest.approx(message_seconds(two, messages))


# -- measured --------------------------------------------------------------------------------------


def test_sums_take_what_the_winners_were_measured_to_take() -> None:
    rows = [(4, 1, 1000, 0.5), (4, 1, 3000, 1.5), (2, 2, 1000, 4.0)]
    winners = tuple(
        Winner(ranks=r, switches=s, bytes=n, algorithm="ring", seconds=t) for r, s, n, t in rows
    )
    links = (link(count=4), link("uplink", count=2))
    cluster = Cluster(name="round", device=DEVICE, links=links, sums=winners)
    net, plain = Network(cluster), network(*links)
    halves = np.repeat([0, 1], 4)
    for nbytes, seconds in ((10, 0.5), (2000, 1.0), (6000, 3.0), (0, 0.0)):
        assert net.sum_seconds(halves, nbytes) == pytest.approx(seconds)
    pairs = np.tile(np.arange(4), 2)  # each at both switches
    assert net.sum_seconds(pairs, 2000) == pytest.approx(8.0)
    everybody = one_segment(8)  # was not measured
    assert net.sum_seconds(everybody, 2000) == plain.sum_seconds(everybody, 2000)
    numbers = np.array([net.sum_model(groups) for groups in (halves, pairs, everybody)])
    nbytes = np.full(3, 2000.0)
    sums = SumCosts(net.sum_models, np.arange(3), numbers, nbytes, np.zeros(3))
    found = sums.each(SumModel.seconds)
    assert found == pytest.approx([1.0, 8.0, plain.sum_seconds(everybody, 2000)])
