"""Verifying a model by name: builds it, makes plans, and compares each with one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.capture import capture
from shardwise.comm import Communicator
from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph import LayerGraph
from shardwise.launch import choose_world, init_from_environment, run_local, under_launcher
from shardwise.models import default_shape, load_model
from shardwise.plan import Plan
from shardwise.verify import TOLERANCE, Comparison, compare

KINDS = ("output", "loss", "gradient", "statistics", "weight")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class KindResult:
    """The tensors of one kind: how many were compared, and the worst of them."""

    kind: str
    num_tensors: int
    worst: Comparison

    @property
    def passed(self) -> bool:
        return self.worst.passed


@dataclass(frozen=True)
class PlanResult:
    """What came of one plan."""

    label: str
    plan: Plan
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    @property
    def error(self) -> float:
        """The largest relative error of all tensors."""
        return max((c.error for c in self.comparisons), default=0.0)

    def by_kind(self) -> list[KindResult]:
        """One entry for each kind of tensor that the model has."""
        groups = {kind: [c for c in self.comparisons if c.kind == kind] for kind in KINDS}
        return [
            KindResult(kind, len(group), max(group, key=lambda c: c.error))
            for kind, group in groups.items()
            if group
        ]


@dataclass(frozen=True)
class Request:
    """Which model to verify, on how many workers, with which plans.

    Without plan, split or random plans, the samples are split. What is not given follows from
    the rest: the workers from plan or split, the shapes from the plan or the zoo.
    """

    spec: str
    workers: int | None = None
    shapes: Shapes = ()
    batch: int | None = None
    plan_file: str | None = None
    split: Mapping[str, int] = field(default_factory=dict)
    num_random: int = 0
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int = 3

    def __post_init__(self) -> None:
        if self.num_random < 0:
            raise ShardwiseError(f"{self.num_random} random plans: there cannot be fewer than 0")
        if self.batch is not None and self.batch < 1:
            raise ShardwiseError(f"a batch of {self.batch} samples: there must be at least 1")


def verify_model(request: Request) -> list[PlanResult]:
    """Trains the model under every plan and on one device, in float64, and compares all tensors.

    The workers are processes of this machine, or those of a launcher: then rank 0 has the results
    and the other ranks get an empty list.

    >>> [result] = verify_model(Request("digits", workers=2))
    >>> result.passed
    True
    """
    saved = Plan.load(request.plan_file) if request.plan_file else None
    world = _world(request, saved)
    model = _model(request)
    shapes = _shapes(request, saved, world)
    graph = capture(model, *_inputs(shapes))
    plans = _plans(request, saved, graph, world)
    del model  # every worker builds its own: memory for one less
    job = (request, shapes, graph, list(plans.values()))
    if under_launcher():
        init_from_environment()
        comparisons = _compare_plans(*job)
        dist.destroy_process_group()
    else:
        comparisons = run_local(_compare_plans, world, *job)[0]
    return [
        PlanResult(label, plan, tuple(found))
        for (label, plan), found in zip(plans.items(), comparisons, strict=False)
    ]


def _world(request: Request, saved: Plan | None) -> int:
    asked = saved.world if saved and request.workers is None else request.workers
    world = choose_world(asked, request.split)
    if saved and saved.world != world:
        raise PlanError(
            f"plan file {request.plan_file!r} is for {saved.world} workers, not for {world}"
        )
    return world


def _shapes(request: Request, saved: Plan | None, world: int) -> Shapes:
    """The input shapes: as asked for, of the plan file, or of the zoo.

    A sample per worker, but two at least: batch norm has no statistics of a single value.
    """
    shapes = request.shapes or (saved.inputs if saved else ())
    shapes = shapes or (default_shape(request.spec, max(2, world)),)
    if request.batch is None:
        return shapes
    return tuple((request.batch, *shape[1:]) for shape in shapes)


def _plans(request: Request, saved: Plan | None, graph: LayerGraph, world: int) -> dict[str, Plan]:
    """All plans that are asked for, by a label."""
    plans: dict[str, Plan] = {}
    if saved:
        saved.check(graph)
        plans[f"plan file {request.plan_file}"] = saved
    split = dict(request.split)
    if not (saved or split or request.num_random):
        split = {"n": world}
    if split:
        label = " ".join(f"{axis}={degree}" for axis, degree in split.items())
        plans[f"split {label}"] = Plan.uniform(graph, world=world, **split)
    for seed in range(request.seed, request.seed + request.num_random):
        plans[f"random plan, seed {seed}"] = Plan.random(graph, world, seed)
    return plans


def _compare_plans(
    request: Request, shapes: Shapes, graph: LayerGraph, plans: Sequence[Plan]
) -> list[list[Comparison]]:
    """On every rank: builds the model (cheaper than sending it) and runs all plans."""
    model, inputs, comm = _model(request), _inputs(shapes), Communicator()
    found = [
        compare(model, plan, inputs, comm, request.num_steps, graphs=lambda training, batch: graph)
        for plan in plans
    ]
    return found if comm.rank == 0 else []


def _model(request: Request) -> nn.Module:
    """The model in float64, with the same random weights wherever it is built."""
    torch.manual_seed(0)
    return load_model(request.spec, **request.options).double()


def _inputs(shapes: Shapes) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)


def summary(results: Sequence[PlanResult]) -> str:
    """One line about all plans."""
    plans = f"{_count(len(results), 'plan')} on {_count(results[0].plan.world, 'worker')}"
    tensors = _count(sum(len(result.comparisons) for result in results), "tensor")
    error = max(result.error for result in results)
    failed = sum(not result.passed for result in results)
    verdict = f"{_count(failed, 'plan')} FAILED" if failed else "equal to one device"
    limits = f"largest relative error {error:.1e}, limit {TOLERANCE:.0e}"
    return f"{plans}, {tensors} compared: {verdict} ({limits})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
