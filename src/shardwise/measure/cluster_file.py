"""`shardwise probe`: a cluster file from measurements on the workers themselves."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils import _pytree as pytree

from shardwise.cluster.cluster import Cluster, Link
from shardwise.cluster.measured_sums import Winner
from shardwise.comm import Communicator
from shardwise.graph.layer_graph import LayerGraph
from shardwise.launch.launchers import choose_world, launched_switches, run_on_workers
from shardwise.measure.racing import Figures, measure_figures, measure_sums
from shardwise.measure.timing import Speeds, device_name, measure_speeds, measure_works, to_cluster
from shardwise.operators import Split
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Timer, Training
from shardwise.planner.layer_times import TimeTable, Work, all_works, first_layers, timer_for
from shardwise.planner.simulate import simulate
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import parallelize
from shardwise.specs.model_spec import ModelSpec
from shardwise.specs.request import PER_WORKER

Times = dict[str, tuple[float, float]]  # of shares by their keys, forward and backward
STEPS = 3  # of each plan that shows what messages cost amid computation
LEAST, TINY = 0.1, 1e-7  # a factor, and seconds
SEED = 11
TRUST = 0.02  # an overhead that is twice the probed one weighs as much as an error of 2 %


@dataclass(frozen=True)
class Found:
    """What one rank measured."""

    speeds: Speeds
    device: str
    times: Times
    steps: list[list[float]]  # seconds of each model's calibration plans
    figures: Figures | None = None  # of messages at a switch and across, where sums were raced
    winners: tuple[Winner, ...] = ()


def probe(
    specs: list[ModelSpec],
    workers: int | None = None,
    again: bool = False,
    sums: bool = False,
) -> Cluster | None:
    """Measures links, devices and the layers that planning these models needs.

    A few steps of each model show what messages cost amid computation. Times of layers that were
    measured before are kept; `again` measures them anew. `sums` finds the fastest algorithm for
    every group and size. Under a launcher rank 0 gets the cluster, the others None.
    """
    world = choose_world(workers)
    graphs = [spec.graph(PER_WORKER * world) for spec in specs]
    wanted = wanted_works(graphs, world)
    found: list[Found] | None = run_on_workers(_measure, world, wanted, specs, again, sums)
    if found is None:
        return None
    times = _median_times([own.times for own in found])
    TimeTable(found[0].device, seconds=times).save()
    memory = int(_machine_memory() * 0.9) // world
    cluster = to_cluster([own.speeds for own in found], "probed", found[0].device, memory)
    cluster = _with_sums(cluster, found[0], launched_switches(world))
    steps = _run_steps(cluster, graphs, found) if world > 1 else []
    return calibrated(cluster, steps) if steps else cluster


def _with_sums(cluster: Cluster, own: Found, switches: tuple[int, ...]) -> Cluster:
    """The cluster with its winners, and with its switches as a level where there are several."""
    if own.figures is None:
        return cluster
    links, figures = cluster.links, own.figures
    if switches[-1] > 0:
        (whole,), per_switch = links, switches.count(0)
        inner = Link(
            name="switch",
            count=per_switch,
            latency=figures.latency,
            bandwidth=1.0 / figures.inside,
            post=whole.post,
            overlap=whole.overlap,
        )
        uplink = {"name": "uplink", "bandwidth": per_switch / figures.across, "shared": False}
        links = (inner, whole.model_copy(update=uplink))
    return cluster.model_copy(update={"links": links, "sums": own.winners})


def _run_steps(cluster: Cluster, graphs: list[LayerGraph], found: list[Found]) -> list[Step]:
    """The steps that were run, and what it takes to simulate them."""
    steps = []
    for number, graph in enumerate(graphs):
        timer = timer_for(cluster, graph)
        for place, plan in enumerate(calibration_plans(graph, cluster.world)):
            seconds = max(own.steps[number][place] for own in found)
            steps.append(Step(plan, graph, timer, Training(), seconds))
    return steps


def wanted_works(graphs: list[LayerGraph], world: int) -> list[Work]:
    """Every share of every layer that a search over these models asks for, each once."""
    works: dict[str, Work] = {}
    cluster = Cluster.load("local").with_workers(world)
    for graph in graphs:
        candidates = Costs(graph, cluster).candidates
        splits = [
            Split(layer, config, world)
            for layer in graph.layers
            for config in candidates.configs(layer, graph.batch)
        ]
        works |= {work.key: work for work in all_works(splits, first_layers(graph))}
    return list(works.values())


def _measure(wanted: list[Work], specs: list[ModelSpec], again: bool, sums: bool) -> list[Found]:
    """What every rank measures, all at once as in training."""
    comm = Communicator()
    device = device_name(torch.get_num_threads())
    known = TimeTable(device) if again else TimeTable.load(device)
    missing = comm.gather_objects(known.missing(wanted))[0]  # rank 0's, so that all agree
    speeds = measure_speeds(comm)
    console = Console(stderr=True, quiet=comm.rank != 0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("timing layers", total=len(missing))
        times = measure_works(missing, lambda done: progress.update(task, completed=done))
        steps = []
        for spec in progress.track(specs if comm.size > 1 else [], description="steps"):
            steps.append(_steps(spec, comm))
    found = Found(speeds, device, times, steps)
    if sums and comm.size > 1:
        switches = launched_switches(comm.size)
        figures, winners = measure_figures(comm, switches), measure_sums(comm, switches)
        found = replace(found, figures=figures, winners=winners)
    return comm.gather_objects(found)


def _steps(spec: ModelSpec, comm: Communicator) -> list[float]:
    """Seconds of a training step of the model under each calibration plan, the median of few."""
    graph = spec.graph(PER_WORKER * comm.size)
    inputs = [torch.rand(graph[name].shape) for name in graph.inputs]
    found = []
    for plan in calibration_plans(graph, comm.size):
        model = parallelize(spec.build(), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        seconds = []
        for _ in range(1 + STEPS):
            comm.gather_objects(None)
            start = time.perf_counter()
            outputs = [y for y in pytree.tree_leaves(model(*inputs)) if isinstance(y, torch.Tensor)]
            sum(y.square().mean() for y in outputs).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            comm.gather_objects(None)
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds[1:]))
    return found


def _median_times(ranks: list[Times]) -> Times:
    """The median over ranks of what each share takes, forward and backward."""
    found: Times = {}
    for key in ranks[0]:
        forward, backward = zip(*(own[key] for own in ranks), strict=True)
        found[key] = (statistics.median(forward), statistics.median(backward))
    return found


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 8 << 30


# -- what messages cost amid computation -----------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One training step that was run, and what it takes to simulate it."""

    plan: Plan
    graph: LayerGraph
    timer: Timer
    training: Training
    seconds: float


@dataclass(frozen=True)
class Overheads:
    """What communication costs amid computation; steps take longer in proportion to each."""

    message: float  # seconds, as the others; see Link
    sum: float
    post: float

    @classmethod
    def of(cls, cluster: Cluster) -> Overheads:
        link = cluster.links[0]
        return cls(link.latency, link.sum_latency or link.latency, link.post)

    def on(self, cluster: Cluster) -> Cluster:
        """The same cluster with these overheads."""
        link, *others = cluster.links
        changed = {"latency": self.message, "post": self.post}
        changed |= {"sum_latency": self.sum} if link.sum_bandwidth else {}
        return cluster.model_copy(update={"links": (link.model_copy(update=changed), *others)})


def calibrated(cluster: Cluster, steps: Sequence[Step]) -> Cluster:
    """The cluster with the overheads that explain these steps best.

    On an idle machine a message takes less: in a step, the threads that move it wait for a core,
    and ranks wait for the slowest of them. So a few steps are run, and the overheads of the
    simulation are those that make both agree best.
    """
    probed = np.maximum(astuple(Overheads.of(cluster)), TINY)
    tried = probed * np.vstack([np.ones(len(probed)), 1.0 + np.eye(len(probed))])  # each doubled
    rows, missing = [], []
    for step in steps:
        base, *raised = (
            simulate(step.plan, step.graph, changed, step.timer, step.training).seconds
            for changed in (Overheads(*values).on(cluster) for values in tried.tolist())
        )
        # In parts of the step, so that short steps count as much as long ones.
        rows.append([(seconds - base) / step.seconds for seconds in raised])
        missing.append((step.seconds - base) / step.seconds)
    factors = 1.0 + _fitted(np.array(rows), np.array(missing))
    found = np.maximum(factors, LEAST) * probed
    return Overheads(*found.tolist()).on(cluster)


def _fitted(rows: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """How much larger each overhead is; those that the steps hardly show stay as probed."""
    trust = TRUST * np.sqrt(len(rows)) * np.eye(rows.shape[1])
    rows = np.concatenate([rows, trust])
    missing = np.concatenate([missing, np.zeros(len(trust))])
    return np.linalg.lstsq(rows, missing, rcond=None)[0]


def calibration_plans(graph: LayerGraph, world: int) -> list[Plan]:
    """Plans that show both: many messages of all kinds, and sums of statistics and gradients."""
    early = {layer.name for layer in graph.layers[: len(graph.layers) // 2]}

    def halves(first: str, second: str) -> Plan:
        """One split for the first half of the layers, another for the rest."""
        a, b = (Plan.uniform(graph, world, **{axis: world}) for axis in (first, second))
        return Plan.make(graph, world, lambda la: (a if la.name in early else b).config(la, graph))

    return [Plan.random(graph, world, SEED), halves("h", "n"), halves("c", "f")]
