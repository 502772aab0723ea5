"""`shardwise probe`: a cluster file from measurements on the workers themselves."""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.cluster import Cluster
from shardwise.comm import Communicator
from shardwise.cost import Costs
from shardwise.graph import LayerGraph
from shardwise.launch import choose_world, init_from_environment, run_local, under_launcher
from shardwise.probe import Speeds, device_name, measure_speeds, measure_works, to_cluster
from shardwise.questions import Question
from shardwise.strategies import Split
from shardwise.timing import TimeTable, Work, all_works, first_layers

Found = tuple[Speeds, str, dict[str, tuple[float, float]]]


def probe(
    questions: list[Question], workers: int | None = None, again: bool = False
) -> Cluster | None:
    """Measures links, devices and the layers that planning these models needs.

    Times of layers that were measured before are kept; `again` measures them anew. Under a launcher
    rank 0 gets the cluster, the others None.
    """
    world = choose_world(workers)
    wanted = _wanted(questions, world)
    if under_launcher():
        init_from_environment()
        gathered = Communicator().gather_objects(_measure(wanted, again))
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not first:
            return None
        found: list[Found] = gathered
    else:
        found = run_local(_measure, world, wanted, again)
    _keep(found)
    memory = int(_machine_memory() * 0.9) // world
    return to_cluster([speeds for speeds, _, _ in found], "probed", found[0][1], memory)


def _wanted(questions: list[Question], world: int) -> list[Work]:
    """Every share of every layer that a search over these models asks for, each once."""
    works: dict[str, Work] = {}
    cluster = Cluster.load("local").with_workers(world)
    for question in questions:
        graph = question.graph(world)
        works |= {
            work.key: work for work in all_works(_splits(graph, cluster), first_layers(graph))
        }
    return list(works.values())


def _splits(graph: LayerGraph, cluster: Cluster) -> list[Split]:
    candidates = Costs(graph, cluster).candidates
    return [
        Split(layer, config, cluster.world)
        for layer in graph.layers
        for config in candidates.configs(layer, graph.batch)
    ]


def _measure(wanted: list[Work], again: bool) -> Found:
    """What this rank measures, all ranks at once as in training."""
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
    return speeds, device, times


def _keep(found: list[Found]) -> None:
    """Adds the median over ranks of every new time to the table on disk."""
    device = found[0][1]
    table = TimeTable.load(device)
    for key in found[0][2]:
        ways: list[Any] = list(zip(*(times[key] for _, _, times in found), strict=True))
        table.seconds[key] = (statistics.median(ways[0]), statistics.median(ways[1]))
    table.save()


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 8 << 30
