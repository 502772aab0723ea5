"""Simulated steps against timelines worked out by hand, and what a trace says about them.

Links carry 1,000 bytes a second, so that 250 float32 take one second. Memory is so fast that
copies and the optimizer take no time, except where a test is about them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from message_times import message_seconds
from shardwise import Config, Engine, LayerGraph, Plan, capture, zoo
from shardwise.cluster.cluster import Cluster, Device, Link
from shardwise.operators import Split
from shardwise.planner.best_plan import predict
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.links import Network, PortQueues
from shardwise.planner.simulate import simulate
from shardwise.plans.compile import compile_program
from shardwise.plans.program import Move, handed_out
from shardwise.plans.trace import Span, Trace

LOCAL = Training(output="local")  # every rank keeps its part of the output
END = Engine("end")


def cluster(world: int, latency: float = 0.0, memory_bandwidth: float = 1e15) -> Cluster:
    """A switch whose ports carry 1,000 bytes a second."""
    device = Device(flops=1e12, memory_bandwidth=memory_bandwidth, memory=1 << 30)
    link = Link(name="switch", count=world, latency=latency, bandwidth=1e3)
    return Cluster(name="round", device=device, links=(link,))


@dataclass(frozen=True)
class Fixed:
    """A timer that is told how long each layer takes forward and backward, per rank or for all."""

    times: Mapping[str, tuple[float | list[float], float | list[float]]]

    def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = self.times.get(split.layer.name, (0.0, 0.0))
        return forward * split.used, backward * split.used


def chain(x: torch.Tensor, **layers: nn.Module) -> LayerGraph:
    return capture(nn.Sequential(OrderedDict(layers)), x)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def conv() -> nn.Conv2d:
    """Nine weights, a halo of one row on either side."""
    return nn.Conv2d(1, 1, 3, padding=1, bias=False)


def spans(trace: Trace, kind: str) -> list[Span]:
    return [span for span in trace.spans if span.kind == kind and span.seconds.any()]


def near(expected: object) -> object:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


# -- timelines by hand -----------------------------------------------------------------------------


def test_sample_parallelism_is_forward_backward_sum() -> None:
    graph = chain(torch.zeros(4, 25), a=linear(25, 10), b=linear(10, 50))
    timer = Fixed({"a": (1.0, 2.0), "b": (3.0, 4.0)})
    trace = simulate(Plan.uniform(graph, n=2), graph, cluster(2, latency=0.5), timer, LOCAL, END)
    compute = 1.0 + 3.0 + 4.0 + 2.0
    # 250 + 500 weights in one buffer; a ring of two: 2 steps of half of it.
    summing = 2 * (0.5 + 3000 / 2 / 1000)
    assert trace.seconds == near(compute + summing)
    assert trace.busy == near([compute, compute])
    assert trace.waiting == near([summing, summing])
    assert trace.communication == near([summing, summing])
    assert trace.exposed == near([summing, summing])
    assert trace.overlap == near(0.0)


def test_a_whole_output_is_gathered_before_the_backward_pass() -> None:
    graph = chain(torch.zeros(4, 25), a=linear(25, 10), b=linear(10, 50))
    timer = Fixed({"a": (1.0, 2.0), "b": (3.0, 4.0)})
    trace = simulate(Plan.uniform(graph, n=2), graph, cluster(2, latency=0.5), timer, gradients=END)
    gathering = 0.5 + 2 * 50 * 4 / 1000  # two samples of 50 numbers to the other rank
    assert trace.seconds == near(10.0 + gathering + 2 * 0.5 + 3.0)


def test_a_sum_begins_when_the_slowest_rank_is_ready() -> None:
    graph = chain(torch.zeros(4, 25), a=linear(25, 10))
    timer = Fixed({"a": ([1.0, 2.0], [1.0, 4.0])})
    trace = simulate(Plan.uniform(graph, n=2), graph, cluster(2), timer, LOCAL, END)
    assert trace.seconds == near(2.0 + 4.0 + 1.0)
    assert trace.busy == near([2.0, 6.0])
    assert trace.waiting == near([5.0, 1.0])
    assert trace.exposed == near([5.0, 1.0])


def test_a_halo_arrives_when_its_sender_is_done_and_the_reader_waits() -> None:
    graph = chain(torch.zeros(1, 1, 8, 250), a=conv(), b=conv())
    timer = Fixed({"a": ([1.0, 2.0], 1.0), "b": (1.0, 2.0)})
    trace = simulate(Plan.uniform(graph, h=2), graph, cluster(2, latency=0.5), timer, LOCAL, END)
    row = 0.5 + 250 * 4 / 1000  # latency and one row
    arrival = [2.0 + row, max(2.0, 1.0 + row)]  # what the other rank has sent after a
    done = [arrival[0] + 1.0 + 2.0, arrival[1] + 1.0 + 2.0]  # b forward and backward
    back = [max(done[0], done[1] + row), max(done[1], done[0] + row)]
    summing = 2 * 0.5 + (9 + 9) * 4 / 1000
    end = max(back) + 1.0 + summing  # a backward
    assert arrival == near([3.5, 2.5]) and back == near([7.0, 8.0])  # in plain numbers
    assert trace.seconds == near(end) == near(10.072)
    halo, gradient = spans(trace, "transfer")
    assert halo.starts == near([1.0, 2.0]) and halo.ends == near(arrival)
    assert halo.blocked == near([2.5, 0.5])
    assert gradient.starts == near(done) and gradient.ends == near(back)
    assert gradient.blocked == near([0.5, 2.5])
    assert trace.busy == near([5.0, 6.0])
    assert trace.exposed + trace.busy == near([end, end])  # nobody is idle for other reasons


BACKWARD = {"a": (1.0, 1.0), "b": (1.0, 3.0), "c": (1.0, 3.0)}  # c is ready at 6, b at 9, a at 10


@pytest.mark.parametrize(
    ("engine", "sums"),
    [
        (Engine("end"), [(10.0, 7.0)]),
        (Engine("layer"), [(6.0, 4.0), (9.0, 2.0), (10.0, 1.0)]),
        (Engine("chunks", last=1), [(6.0, 4.0), (10.0, 3.0)]),
        (Engine("chunks", last=2), [(9.0, 6.0), (10.0, 1.0)]),
        (Engine("chunks", last=3), [(10.0, 7.0)]),
        (Engine("buckets", bucket_bytes=4000), [(6.0, 4.0), (10.0, 3.0)]),
        (Engine("buckets", bucket_bytes=5000), [(9.0, 6.0), (10.0, 1.0)]),
        (Engine("buckets", bucket_bytes=8000), [(10.0, 7.0)]),
    ],
    ids=lambda value: (
        f"{value.mode}-{value.last}-{value.bucket_bytes}" if type(value) is Engine else ""
    ),
)
def test_engines_sum_gradients_when_they_say(
    engine: Engine, sums: list[tuple[float, float]]
) -> None:
    """Of 1,000, 2,000 and 4,000 bytes; `sums` says when each is ready, and its bytes' seconds."""
    graph = chain(torch.zeros(2, 25), a=linear(25, 10), b=linear(10, 50), c=linear(50, 20))
    timer, machines = Fixed(BACKWARD), cluster(2, latency=0.25)
    trace = simulate(Plan.uniform(graph, n=2), graph, machines, timer, LOCAL, engine)
    free, over, blocked, spent = 0.0, 10.0, 0.0, 0.0
    for ready, seconds in sums:
        took = 2 * 0.25 + seconds
        free = max(ready, free) + took  # one sum after the other
        blocked, spent = blocked + max(0.0, free - over), spent + took
        over = max(over, free)
    assert trace.seconds == near(over)
    assert trace.communication == near([spent, spent])
    assert trace.exposed == near([blocked, blocked])
    assert trace.overlap == near((spent - blocked) / spent)  # P3, equation 11
    assert trace.busy == near([10.0, 10.0])


def test_summing_early_hides_communication_and_packing_saves_latency() -> None:
    graph = chain(torch.zeros(2, 25), a=linear(25, 10), b=linear(10, 50), c=linear(50, 20))
    plan, machines = Plan.uniform(graph, n=2), cluster(2, latency=0.25)

    def step(*engine: object) -> tuple[float, float]:
        trace = simulate(plan, graph, machines, Fixed(BACKWARD), LOCAL, Engine(*engine))
        return trace.seconds, trace.overlap

    # (end - 10) is the exposed part: the sum of 7,000 bytes; the last 0.5 + 2.5 + 1.5; ...
    assert step("end") == near((17.5, 0.0))
    assert step("layer") == near((14.5, 4.0 / 8.5))
    assert step("chunks", 1) == near((14.0, 4.0 / 8.0))
    assert step("buckets", 0, 5000) == near((17.0, 1.0 / 8.0))


def test_the_next_layer_may_use_fewer_workers() -> None:
    graph = chain(torch.zeros(2, 1, 5, 50), a=conv(), b=conv())
    split = {"input": Config(n=2), "a": Config(n=2), "b": Config()}
    plan = Plan.make(graph, 2, lambda layer: split[layer.name])
    timer = Fixed({"a": (1.0, 1.0), "b": (2.0, 2.0)})
    trace = simulate(plan, graph, cluster(2, latency=0.5), timer, LOCAL, END)
    sample = 0.5 + 250 * 4 / 1000
    arrival = 1.0 + sample  # rank 1 sends its sample to rank 0
    back = arrival + 2.0 + 2.0 + sample  # rank 0 returns the gradient
    summing = 2 * 0.5 + 9 * 4 / 1000  # of a's weights; b's are on one rank only
    assert trace.seconds == near(back + 1.0 + summing)
    assert trace.busy == near([1.0 + 2.0 + 2.0 + 1.0, 1.0 + 1.0])
    forward, backward = spans(trace, "transfer")
    assert forward.ends == near([arrival, 1.0]) and forward.blocked == near([sample, 0.0])
    assert backward.ends == near([back - sample, back])
    assert backward.blocked == near([0.0, back - 1.0])


def test_statistics_block_in_the_middle_of_a_norm_both_ways() -> None:
    layers = {"a": nn.Conv2d(1, 125, 1, bias=False), "norm": nn.BatchNorm2d(125)}
    graph = chain(torch.zeros(2, 1, 2, 2), **layers)
    timer = Fixed({"a": (1.0, 2.0), "norm": (2.0, 4.0)})
    trace = simulate(Plan.uniform(graph, n=2), graph, cluster(2, latency=0.5), timer, LOCAL, END)
    statistics = 2 * 0.5 + 2 * 125 * 8 / 1000  # two float64 per channel
    summing = 2 * 0.5 + 3 * 125 * 4 / 1000  # weights of a, weights and biases of the norm
    forward, backward = 1.0 + 2.0 + statistics, 4.0 + statistics + 2.0
    assert trace.seconds == near(forward + backward + summing) == near(17.5)
    first, second = spans(trace, "statistics")
    assert first.starts == near([2.0, 2.0]) and first.ends == near([5.0, 5.0])
    assert second.starts == near([8.0, 8.0]) and second.ends == near([11.0, 11.0])
    assert trace.exposed == near([2 * statistics + summing] * 2)


def test_local_statistics_cost_no_communication() -> None:
    layers = {"a": nn.Conv2d(1, 125, 1, bias=False), "norm": nn.BatchNorm2d(125, affine=False)}
    graph = chain(torch.zeros(2, 1, 2, 2), **layers)
    timer, own = Fixed({"norm": (2.0, 4.0)}), Training(output="local", statistics="local")
    plan = Plan.uniform(graph, n=2)
    trace = simulate(plan, graph, cluster(2, latency=0.5), timer, own, END)
    assert not spans(trace, "statistics")
    assert trace.seconds == near(2.0 + 4.0 + 2 * 0.5 + 125 * 4 / 1000)
    rows = {row.layer: row for row in predict(plan, Costs(graph, cluster(2), timer, own)).rows}
    assert rows["norm"].transfer == rows["norm"].moved == 0


def test_the_slowest_rank_delays_the_statistics_of_all() -> None:
    norm = nn.BatchNorm2d(125, affine=False)
    graph = chain(torch.zeros(2, 1, 2, 2), a=nn.Conv2d(1, 125, 1, bias=False), norm=norm)
    timer = Fixed({"a": ([1.0, 3.0], 1.0), "norm": (2.0, 2.0)})
    trace = simulate(Plan.uniform(graph, n=2), graph, cluster(2), timer, LOCAL, END)
    first = spans(trace, "statistics")[0]
    assert first.starts == near([2.0, 4.0]) and first.ends == near([6.0, 6.0])
    assert first.blocked == near([4.0, 2.0])


def test_a_step_lasts_to_the_end_of_a_norm_that_comes_last() -> None:
    graph = chain(torch.zeros(2, 125, 2, 2), norm=nn.BatchNorm2d(125, affine=False))
    only_forward = Training(output="local", gradients=False)
    timer = Fixed({"norm": (2.0, 2.0)})
    trace = simulate(Plan.uniform(graph, n=2), graph, cluster(2), timer, only_forward)
    assert trace.seconds == near(1.0 + 2.0 + 1.0)


def test_partial_sums_are_scattered_forward_and_gathered_backward() -> None:
    graph = chain(torch.zeros(5, 20), a=linear(20, 100))
    plan = Plan.uniform(graph, c=2)
    trace = simulate(plan, graph, cluster(2, latency=0.5), Fixed({"a": (1.0, 1.0)}), LOCAL, END)
    half = 0.5 + 5 * 50 * 4 / 1000  # half of the partial sums goes to the other rank
    assert trace.seconds == near(1.0 + half + half + 1.0)


def test_gathered_gradients_carry_activations_and_errors() -> None:
    graph = chain(torch.zeros(10, 25), a=linear(25, 50))
    split = {"input": Config(n=2), "a": Config(n=2, gradient="gather")}
    plan = Plan.make(graph, 2, lambda layer: split[layer.name])
    timer = Fixed({"a": (1.0, 1.0)})
    trace = simulate(plan, graph, cluster(2, latency=0.5), timer, LOCAL, END)
    gathering = 2 * 0.5 + 5 * (25 + 50) * 4 / 1000  # of five samples, inputs and errors (P3)
    assert trace.seconds == near(2.0 + gathering)
    assert trace.communication == near([gathering, gathering])


def test_gradients_of_all_readers_on_other_ranks_are_in_the_trace() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = conv(), conv(), nn.Conv2d(1, 1, 5, padding=2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(x) + self.c(x)

    graph = capture(Fork(), torch.zeros(1, 1, 8, 250))
    times = dict.fromkeys("abc", (1.0, 1.0))
    trace = simulate(Plan.uniform(graph, h=2), graph, cluster(2), Fixed(times), LOCAL, END)
    one, two = 250 * 4 / 1000, 2 * 250 * 4 / 1000  # rows that b and c read of the other rank
    done = 1.0 + one + two + 1.0  # both leave after a, one after the other, and c waits for its own
    # c's halo returns at done + 1 while b runs backward; b's queues behind it at the same ports.
    back = done + 1.0 + two + one
    moved = [
        (span.name, float(span.starts[0]), float(span.ends[0])) for span in spans(trace, "transfer")
    ]
    assert moved == [
        ("a>0", near(1.0), near(1.0 + one)),
        ("a>1", near(1.0), near(1.0 + one + two)),
        ("a gradient", near(done + 1.0), near(done + 1.0 + two)),
        ("a gradient", near(done + 2.0), near(back)),
    ]
    assert trace.seconds == near(back + 1.0 + (9 + 9 + 25) * 4 / 1000)


# -- copies and the optimizer ----------------------------------------------------------------------


def test_messages_are_packed_and_unpacked_in_memory() -> None:
    graph = chain(torch.zeros(2, 1, 5, 50), a=conv(), b=conv())
    split = {"input": Config(n=2), "a": Config(n=2), "b": Config()}
    plan = Plan.make(graph, 2, lambda layer: split[layer.name])
    fast, slow = (
        simulate(plan, graph, cluster(2, memory_bandwidth=b), Fixed({}), LOCAL) for b in (1e15, 2e3)
    )
    copies = [span for span in slow.spans if span.kind == "copy"]
    assert copies and all(span.lane == "compute" for span in copies)
    assert slow.seconds > fast.seconds and not fast.busy.round(6).any()
    forward = [span for span in copies if "gradient" not in span.name][:2]
    # Rank 1 packs a sample of 1,000 bytes: read and written at 2,000 bytes a second, one second.
    assert forward[0].seconds[1] == near(1.0) and forward[1].seconds == near([1.0, 0.0])


def test_the_optimizer_updates_what_each_rank_holds() -> None:
    graph = chain(torch.zeros(4, 25), a=linear(25, 10))
    whole = Plan.make(graph, 2, lambda layer: Config())
    for training in (LOCAL, Training(output="local", states=2)):
        trace = simulate(whole, graph, cluster(2, memory_bandwidth=1e3), Fixed({}), training)
        (update,) = spans(trace, "update")
        assert update.seconds[0] >= 3 * 1.0  # weights and gradients read, weights written
        assert update.seconds[1] == 0.0  # it holds nothing
        assert trace.seconds == near(float(update.ends.max()))


# -- links -----------------------------------------------------------------------------------------


MACHINES = ["4x10Gb", "2x4@1Gb/4:1", "2x2x2@1Gb/2:1/3:1", "lassen", "local"]


@pytest.mark.parametrize("name", MACHINES)
def test_messages_that_start_together_take_what_the_network_says(name: str) -> None:
    machines = Cluster.load(name)
    network = Network(machines.with_workers(8 if machines.world != 4 else 4))
    generator = np.random.default_rng(1)
    for density in (0.1, 0.5, 1.0):
        for _ in range(10):
            shape = (network.world, network.world)
            matrix = generator.integers(1, 9, shape) * 1e5 * (generator.random(shape) < density)
            np.fill_diagonal(matrix, 0.0)
            arrival = PortQueues(network).carry(matrix, np.zeros(network.world))
            assert arrival.max() == pytest.approx(message_seconds(network, matrix))
            assert not arrival[matrix.sum(axis=0) == 0].any()  # who gets nothing waits for nothing


def test_a_port_serves_one_transfer_after_the_other() -> None:
    lanes = PortQueues(Network(cluster(3, latency=0.5)))
    first, second = np.zeros((2, 3, 3))
    first[0, 1], second[0, 2] = 2000.0, 1000.0
    assert lanes.carry(first, np.zeros(3)) == near([0.0, 2.5, 0.0])
    assert lanes.carry(second, np.ones(3)) == near([1.0, 1.0, 3.5])  # 0's port is free at 2
    back = np.zeros((3, 3))
    back[1, 0] = 1000.0
    assert lanes.carry(back, np.ones(3)) == near([2.5, 1.0, 1.0])  # the other way is free


# -- any plan --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Halos, a norm, a branch, a pool, and a linear layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.linear = nn.BatchNorm2d(4), nn.Linear(4 * 4 * 3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv1(x)).relu()
        x = torch.cat([self.conv2(x), x], 1)[:, 2:6]
        return self.linear(nn.functional.max_pool2d(x, 2).flatten(1))


BLOCK = capture(Block(), torch.zeros(4, 2, 8, 6))
PLANS = [
    Plan.uniform(BLOCK, n=4),
    Plan.uniform(BLOCK, h=2, w=2),
    Plan.uniform(BLOCK, c=2, f=2),
    Plan.owt(BLOCK, 4),
    *(Plan.random(BLOCK, 4, seed) for seed in range(6)),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.layers["conv2"]))
def test_simulated_bytes_are_those_of_the_transfers(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = []
    carry = PortQueues.carry

    def recorded(lanes: PortQueues, matrix: np.ndarray, *others: np.ndarray) -> np.ndarray:
        carried.append(matrix)
        return carry(lanes, matrix, *others)

    monkeypatch.setattr(PortQueues, "carry", recorded)
    simulate(plan, BLOCK, cluster(4))
    params = frozenset(name for layer in BLOCK.layers for name in layer.params)
    program = compile_program(BLOCK, plan, 0, params)
    expected = [s.transfer.messages for s in program.forward if isinstance(s, Move)]
    expected += [handed_out(program.layouts[name], "full").messages for name in program.outputs]
    expected += [s.transfer.messages.T for s in program.backward if isinstance(s, Move)]
    assert sum(m.sum() for m in carried) == 4 * sum(m.sum() for m in expected)
    wanted = sorted((4 * m).tolist() for m in expected if m.any())
    assert sorted(m.tolist() for m in carried if m.any()) == wanted


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.layers["conv2"]))
@pytest.mark.parametrize("mode", ["end", "layer"])
def test_every_rank_computes_or_waits_and_never_twice_at_once(plan: Plan, mode: str) -> None:
    trace = simulate(plan, BLOCK, Cluster.load("2x2@1Gb/4:1"), gradients=Engine(mode))
    assert trace.busy + trace.waiting == near([trace.seconds] * 4)
    assert (trace.waiting >= -1e-12).all()
    assert (trace.exposed <= trace.waiting + 1e-12).all()  # idle ranks wait for more than links
    assert (trace.exposed <= trace.communication + 1e-12).all()
    assert 0.0 <= trace.overlap <= 1.0
    for rank in range(4):
        for lane in ("compute", "gradients"):
            used = [(s.starts[rank], s.ends[rank]) for s in trace.spans if s.lane == lane]
            used = sorted((start, end) for start, end in used if end > start)
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(used))


@pytest.mark.parametrize("degrees", [{"n": 4}, {"f": 4}, {"n": 2, "f": 2}], ids=str)
def test_without_overlap_or_latency_a_step_takes_its_predicted_cost(
    degrees: dict[str, int],
) -> None:
    """Balanced splits over a chain leave nothing to hide: the sum of costs (P4, equation 1)."""
    graph = capture(zoo.build("digits", width=4), torch.zeros(8, 1, 8, 8))
    timer = Fixed({layer.name: (1.0, 2.0) for layer in graph.layers if layer.op != "input"})
    plan, machines = Plan.uniform(graph, **degrees), cluster(4)
    prediction = predict(plan, Costs(graph, machines, timer))
    step = simulate(plan, graph, machines, timer, gradients=END)
    assert step.seconds == near(prediction.seconds)


def test_one_worker_has_no_communication() -> None:
    trace = simulate(Plan.uniform(BLOCK, n=1), BLOCK, Cluster.load("local"))
    assert trace.seconds > 0 and trace.busy == near([trace.seconds])
    assert not trace.communication.any() and not trace.exposed.any() and not trace.waiting.any()
    assert trace.overlap == 1.0
    assert {span.lane for span in trace.spans if span.seconds.any()} == {"compute"}


def test_without_gradients_only_the_forward_pass_happens() -> None:
    trace = simulate(PLANS[0], BLOCK, cluster(4), training=Training(gradients=False))
    assert not spans(trace, "backward") and not spans(trace, "gradients")
    assert not spans(trace, "update") and spans(trace, "forward")


# -- Perfetto --------------------------------------------------------------------------------------


def test_the_perfetto_export_is_what_its_viewer_reads(tmp_path) -> None:
    trace = simulate(PLANS[1], BLOCK, Cluster.load("4x10Gb"), gradients=Engine("layer"))
    trace.save(tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_text())
    events = data["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in complete)
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} <= threads
    last = max(event["ts"] + event["dur"] for event in complete)
    assert last == pytest.approx(1e6 * trace.seconds)  # microseconds
    busy = [sum(e["dur"] for e in complete if e["pid"] == r and e["tid"] == 0) for r in range(4)]
    assert busy == pytest.approx((1e6 * trace.busy).tolist())


def test_the_perfetto_export_shows_only_so_many_ranks() -> None:
    trace = simulate(PLANS[0], BLOCK, cluster(4))
    assert {event["pid"] for event in trace.to_perfetto(2)["traceEvents"]} == {0, 1}


# -- many workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [256, pytest.param(1024, marks=pytest.mark.deep)])
def test_resnet50_is_simulated_on_many_workers(world: int) -> None:
    machines = Cluster.load("taihulight").with_workers(world)
    with torch.device("meta"):
        model = zoo.build("resnet50")
        graph = capture(model, torch.empty(zoo.input_shape("resnet50", 32 * world)))
    plan = Plan.uniform(graph, n=world)
    trace = simulate(plan, graph, machines, None, LOCAL, END)
    assert trace.world == world and trace.busy == pytest.approx(trace.busy[0])
    assert trace.seconds == near(float(trace.busy[0] + trace.exposed[0]))
    # 25.6 million weights; no algorithm sends less than nearly two copies of them.
    assert trace.per_rank("gradients")[0] > 2 * (1 - 1 / world) * 25.5e6 * 4 / 12e9
    early = simulate(plan, graph, machines, None, LOCAL, Engine("chunks", 9))
    assert early.overlap > trace.overlap and early.seconds < trace.seconds
