"""Measuring a machine: the times of layers, the speed of devices and of links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from shardwise.cluster.cluster import Cluster, Device, Link
from shardwise.comm import Communicator, Pending
from shardwise.kernels.tuner import cpu_name, seconds
from shardwise.operators import STRATEGIES, Local, Split
from shardwise.planner.layer_times import Work

SMALL, LARGE = 1 << 10, 1 << 21  # numbers of a message whose latency, whose bandwidth counts
MESSAGES = 12  # between computations, whose cost is measured together
REPEATS, ENOUGH = 5, 0.3  # runs of a layer, and the seconds after which fewer are enough


@dataclass(frozen=True)
class Speeds:
    """What a device and its links were measured to do."""

    flops: float
    memory_bandwidth: float
    launch: float
    latency: float
    bandwidth: float
    sum_latency: float
    sum_bandwidth: float
    post: float
    overlap: float


def device_name(threads: int) -> str:
    """What times are kept under: the device and the threads that computed."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} torch {torch.__version__}"
    return f"{cpu_name(('model name',))} {threads} threads torch {torch.__version__}"


# -- layers ----------------------------------------------------------------------------------------


@torch.inference_mode(False)  # backward passes are timed, too
def measure_works(
    wanted: list[Work],
    report: Callable[[int], None] | None = None,
    runs: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, tuple[float, float]]:
    """Forward and backward seconds of each share, the median over runs, on this rank."""
    found = {}
    scratch = torch.empty(1 << 22)  # 16 MiB: what a layer finds in the cache is not its own
    for count, work in enumerate(wanted):
        found[work.key] = _measure(work, scratch, runs, clock)
        if report is not None:
            report(count + 1)
    return found


def _measure(
    work: Work, scratch: torch.Tensor, runs: int, clock: Callable[[], float]
) -> tuple[float, float]:
    local, tensors = _share(work)
    strategy = STRATEGIES[work.layer.op]
    forward, backward, begin = [], [], time.perf_counter()
    for run in range(runs + 1):
        # What is overwritten must not be a leaf.
        operands = [tensors[0] * 1.0, *tensors[1:]] if local.in_place else tensors
        scratch.fill_(run)
        start = clock()
        with torch.enable_grad():
            y = strategy.run(local, operands)
        forward.append(clock() - start)
        wanted = [t for t in tensors if t.requires_grad]
        if wanted and y.requires_grad:
            gradient = torch.full_like(y, 0.5)
            scratch.fill_(run)
            start = clock()
            torch.autograd.grad(y, wanted, gradient, allow_unused=True)
            backward.append(clock() - start)
        if run >= 2 and time.perf_counter() - begin > ENOUGH:
            break
    return statistics.median(forward[1:]), statistics.median(backward[1:] or [0.0])


def _share(work: Work) -> tuple[Local, list[torch.Tensor]]:
    """A rank's share of a layer with random operands; sums and gathers stay on this rank."""
    layer, strategy = work.layer, STRATEGIES[work.layer.op]
    split = Split(layer, work.config, work.world)
    needs = [need.layout[work.rank] for need in strategy.needs(split)]
    sums = strategy.sums(split)
    box = sums[work.rank] if sums is not None else None
    result = (strategy.partial(split) or strategy.output(split))[work.rank]
    local = Local(
        layer,
        work.config,
        result,
        tuple(needs),
        box,
        sum=lambda x: x,
        gather=tuple(_gathered(target.shape) for _, target in strategy.gathers(split)),
        later=lambda gradients: gradients(),
        module=SimpleNamespace(training=True, momentum=0.1),
        in_place=layer.traits.in_place and work.input_gradient,
    )
    tensors = []
    for operand, need in zip(layer.operands, needs, strict=True):
        tensor = torch.rand(need.shape) * 0.1
        trains = operand.kind == "param" or (operand.kind == "value" and work.input_gradient)
        tensors.append(tensor.requires_grad_(trains))
    return local, tensors


def _gathered(shape: tuple[int, ...]) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    whole = torch.rand(shape) * 0.1
    return lambda part: lambda: whole


# -- devices and links -----------------------------------------------------------------------------


def measure_speeds(comm: Communicator) -> Speeds:
    """The device's and the links' figures, measured on all ranks at once."""
    world = comm.size
    comm.prepare([tuple(range(world))])
    small, large = (_exchange_seconds(comm, n) for n in (SMALL, LARGE))
    moved = 4.0 * LARGE * world  # all messages of one round
    sum_small, sum_large = (_sum_seconds(comm, n) for n in (SMALL, LARGE))
    share = 2.0 * (world - 1) / world if world > 1 else 1.0
    return Speeds(
        flops=_flops(),
        memory_bandwidth=_memory_bandwidth(),
        launch=_launch(),
        latency=small,
        bandwidth=_rate(moved, small, large) if world > 1 else 1e12,
        sum_latency=sum_small,
        sum_bandwidth=_rate(share * 4.0 * LARGE, sum_small, sum_large) if world > 1 else 1e12,
        post=_post_seconds(comm),
        overlap=_overlap(comm),
    )


def _rate(moved_bytes: float, small: float, large: float) -> float:
    """Bytes a second, from the times of a small message and of this one.

    On a loaded machine the small one may have taken longer; a tenth of the time is bytes at least.
    """
    return moved_bytes / max(large - small, 0.1 * large)


def _median(function: Callable[[], object], runs: int = 9) -> float:
    return statistics.median([seconds(function) for _ in range(runs + 2)][2:])


def _seconds_together(comm: Communicator, function: Callable[[], object]) -> float:
    """What this rank takes where all begin at the same moment."""
    comm.gather_objects(None)
    return seconds(function)


def _amid_work(comm: Communicator, message: Callable[[], object]) -> float:
    """What a message takes between computations, as in training.

    On an idle machine it takes less: the threads that move it then need not wait for a core. Where
    ranks share cores, one that waits for another leaves it its core, so that what counts is by how
    much all end later than without messages.
    """
    x, w = torch.rand(4, 32, 32, 32), torch.rand(32, 32, 3, 3)

    def work(act: Callable[[], object]) -> None:
        for _ in range(MESSAGES):
            torch.conv2d(x, w, padding=1)
            act()

    def slowest(act: Callable[[], object]) -> float:
        return max(comm.gather_objects(_seconds_together(comm, lambda: work(act))))

    rounds = [(slowest(message), slowest(lambda: None)) for _ in range(4)]
    more = [both - alone for both, alone in rounds[1:]]
    return max(statistics.median(more) / MESSAGES, 1e-6)


def _ring(comm: Communicator, numel: int) -> Callable[[], Pending]:
    """Every rank sends to the next and receives from the one before, all at once."""
    sent, received = torch.zeros(numel), torch.zeros(numel)
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.exchange([(ahead, sent)], [(behind, received)])


def _exchange_seconds(comm: Communicator, numel: int) -> float:
    exchange = _ring(comm, numel)
    return _amid_work(comm, lambda: exchange().wait()) if comm.size > 1 else 0.0


def _post_seconds(comm: Communicator) -> float:
    """A rank's own time to start one message, of the two that an exchange starts."""
    if comm.size == 1:
        return 0.0
    exchange, times = _ring(comm, SMALL), []
    for _ in range(MESSAGES):
        start = time.perf_counter()
        pending = exchange()
        times.append(time.perf_counter() - start)
        pending.wait()
    return statistics.median(times) / 2


def _sum_seconds(comm: Communicator, numel: int) -> float:
    x, ranks = torch.zeros(numel), tuple(range(comm.size))
    return _amid_work(comm, lambda: comm.all_reduce(ranks, x).wait()) if comm.size > 1 else 0.0


def _overlap(comm: Communicator) -> float:
    """The part of a large sum that computation hides; less where both need the same cores."""
    if comm.size == 1:
        return 1.0
    x, w = torch.rand(4, 64, 32, 32), torch.rand(64, 64, 3, 3)
    data, ranks = torch.zeros(LARGE), tuple(range(comm.size))

    def compute() -> None:
        for _ in range(4):
            torch.conv2d(x, w, padding=1)

    def both() -> None:
        pending = comm.all_reduce(ranks, data)
        compute()
        pending.wait()

    works = (compute, lambda: comm.all_reduce(ranks, data).wait(), both)
    rounds = [[_seconds_together(comm, work) for work in works] for _ in range(6)]
    alone, summing, together = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
    hidden = (alone + summing - together) / min(alone, summing)
    return min(max(hidden, 0.0), 1.0)


def _flops() -> float:
    x, w = torch.rand(8, 64, 32, 32), torch.rand(64, 64, 3, 3)
    return 2.0 * 8 * 64 * 64 * 9 * 32 * 32 / _median(lambda: torch.conv2d(x, w, padding=1))


def _memory_bandwidth() -> float:
    """Bytes read and written per second when parts are put together in a new tensor.

    Nothing of them is in the cache, as after a layer that has read and written other tensors.
    """
    scratch, part = torch.empty(1 << 23), torch.rand(16, 64, 16, 16)
    times = []
    for run in range(11):
        scratch.fill_(run)
        times.append(seconds(lambda: torch.cat([part, part], dim=1)))
    return 2.0 * 4 * 2 * part.numel() / statistics.median(times[2:])


def _launch() -> float:
    x = torch.rand(8)
    return _median(lambda: [torch.relu(x) for _ in range(100)]) / 100


def to_cluster(ranks: list[Speeds], name: str, device: str, memory: int) -> Cluster:
    """One cluster description from what ranks measured: mean latencies, medians of the rest."""

    def typical(field: str) -> float:
        average = np.mean if field.endswith("latency") or field == "post" else np.median
        return float(average([getattr(speeds, field) for speeds in ranks]))

    link = Link(
        name="measured",
        latency=typical("latency"),
        bandwidth=typical("bandwidth"),
        shared=True,
        sum_latency=typical("sum_latency") if len(ranks) > 1 else None,
        sum_bandwidth=typical("sum_bandwidth") if len(ranks) > 1 else None,
        post=typical("post"),
        overlap=typical("overlap"),
    )
    return Cluster(
        name=name,
        device=Device(
            name=device,
            flops=typical("flops"),
            memory_bandwidth=typical("memory_bandwidth"),
            memory=memory,
            launch=typical("launch"),
        ),
        links=(link,),
        workers=len(ranks),
    )
