"""Verifying a model by name: builds it, makes plans, and compares each with one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm import Communicator
from shardwise.errors import CaptureError, PlanError, ShardwiseError, WorkerError, one_line
from shardwise.graph.layer_graph import LayerGraph
from shardwise.launch.launchers import choose_world, init_from_environment, under_launcher
from shardwise.launch.workers import run_local
from shardwise.model.torch_export import Captured
from shardwise.plans.plan import Plan
from shardwise.specs.model_spec import default_shape, load_model
from shardwise.verify.comparison import Comparison
from shardwise.verify.inputs import FLOAT, draw_inputs
from shardwise.verify.proof import compare
from shardwise.verify.results import PlanResult

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
DEVICES = ("cpu", "cuda")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ToVerify:
    """Which model to verify, on how many workers, with which plans.

    Without plan, split or random plans, the samples are split. What is not given follows from
    the rest: the workers from plan or split, the shapes from the plan or the zoo. `kinds` are those
    of the inputs, see `parse_input`.
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
    training: bool = True
    dtype: str = "float64"
    device: str = "cpu"
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_random < 0:
            raise ShardwiseError(f"{self.num_random} random plans: there cannot be fewer than 0")
        if self.batch is not None and self.batch < 1:
            raise ShardwiseError(f"a batch of {self.batch} samples: there must be at least 1")
        if self.kinds and self.shapes and len(self.kinds) != len(self.shapes):
            raise ShardwiseError(f"{len(self.kinds)} kinds of {len(self.shapes)} inputs are given")
        if self.dtype not in DTYPES:
            raise ShardwiseError(f"dtype {self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ShardwiseError(f"device {self.device!r} must be one of {', '.join(DEVICES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ShardwiseError("device 'cuda' is not there; use cpu")


def verify_model(request: ToVerify) -> list[PlanResult]:
    """Runs the model under every plan and on one device, and compares all tensors.

    The workers are processes of this machine, or those of a launcher: then rank 0 has the results
    and the other ranks get an empty list.

    >>> [result] = verify_model(Request("digits", workers=2))
    >>> result.passed
    True
    """
    saved = Plan.load(request.plan_file) if request.plan_file else None
    world = _world(request, saved)
    model = _model(request)
    request = _with_inputs(request, saved, world)
    graphs = _graphs(request, model)
    del model  # every worker builds its own: memory for one less
    plans = _plans(request, saved, graphs[True], world)
    job = (request, graphs, plans)
    if under_launcher():
        cpu = request.device == "cpu" and torch.cuda.is_available()  # else it would take NCCL
        init_from_environment(backend="gloo" if cpu else None)
        comparisons = _compare_plans(*job)
        dist.destroy_process_group()
    else:
        comparisons = _on_local_workers(request, world, job)
    return [
        PlanResult(label, plan, tuple(found))
        for (label, plan), found in zip(plans.items(), comparisons, strict=False)
    ]


Graphs = dict[bool, LayerGraph]  # by whether the model trains


def _graphs(request: ToVerify, model: nn.Module) -> Graphs:
    """The layer graphs that workers need."""
    inputs = _inputs(request)
    modes = (True,) if request.training else (True, False)
    try:
        return {mode: Captured(model, inputs, mode).graph(inputs[0].shape[0]) for mode in modes}
    except ShardwiseError:
        raise
    except Exception as error:
        raise CaptureError(f"{request.spec!r} cannot be captured: {one_line(error)}") from error


def _on_local_workers(request: ToVerify, world: int, job: tuple[Any, ...]) -> Any:
    try:
        return run_local(_compare_plans, world, *job)[0]
    except (ShardwiseError, WorkerError):
        raise
    except Exception as error:  # of sending the graph to the workers
        raise ShardwiseError(f"{request.spec!r} cannot be verified: {one_line(error)}") from error


def _world(request: ToVerify, saved: Plan | None) -> int:
    asked = saved.world if saved and request.workers is None else request.workers
    world = choose_world(asked, request.split)
    if saved and saved.world != world:
        raise PlanError(
            f"plan file {request.plan_file!r} is for {saved.world} workers, not for {world}"
        )
    return world


def _with_inputs(request: ToVerify, saved: Plan | None, world: int) -> ToVerify:
    """The request with its input shapes: as asked for, of the plan file, or of the zoo.

    A sample per worker, but two at least: batch norm has no statistics of a single value.
    """
    shapes, kinds = request.shapes, request.kinds
    if not shapes and saved:
        shapes, kinds = saved.inputs, kinds or saved.dtypes
    shapes = shapes or (default_shape(request.spec, max(2, world)),)
    if request.batch is not None:
        shapes = tuple((request.batch, *shape[1:]) for shape in shapes)
    return replace(request, shapes=shapes, kinds=kinds or (FLOAT,) * len(shapes))


def _plans(request: ToVerify, saved: Plan | None, graph: LayerGraph, world: int) -> dict[str, Plan]:
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
    request: ToVerify, graphs: Graphs, plans: Mapping[str, Plan]
) -> list[list[Comparison]]:
    """On every rank: builds the model (cheaper than sending it) and runs all plans."""
    comm, device = Communicator(), torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", comm.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # rounds more than float32 says
    model = _model(request).to(device)
    inputs = tuple(x.to(device) for x in _inputs(request))
    # A graph has the device of the model that it was captured from.
    known = (lambda training, _: graphs[training]) if device.type == "cpu" else None
    found = []
    for label, plan in plans.items():
        try:
            found.append(
                compare(model, plan, inputs, comm, request.num_steps, known, request.training)
            )
        except ShardwiseError:
            raise
        except Exception as error:
            raise ShardwiseError(
                f"{request.spec!r} runs on one device, but not under {label}: {one_line(error)}"
            ) from error
    return found if comm.rank == 0 else []


def _model(request: ToVerify) -> nn.Module:
    """The model with the same random weights wherever it is built."""
    torch.manual_seed(0)
    return load_model(request.spec, **request.options).to(DTYPES[request.dtype])


def _inputs(request: ToVerify) -> tuple[torch.Tensor, ...]:
    return draw_inputs(request.shapes, request.kinds, DTYPES[request.dtype])
