"""Verifying a model by name: makes it, its inputs and plans, and compares each with one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.errors import CaptureError, PlanError, ShardwiseError, WorkerError, one_line
from shardwise.graph.layer_graph import LayerGraph
from shardwise.launch.launchers import choose_world, run_on_workers
from shardwise.model.torch_export import Captured, shapes_of
from shardwise.plans.plan import Plan
from shardwise.plans.plan_file import FLOAT
from shardwise.specs.model_spec import ModelSpec
from shardwise.specs.plan_spec import PlanSpec
from shardwise.verify.comparison import Comparison
from shardwise.verify.proof import compare
from shardwise.verify.results import PlanResult

WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
DEVICES = ("cpu", "cuda")


def parse_input(text: str) -> tuple[str, str]:
    """What is said of an input's shape, and its kind, with a bound for whole numbers.

    >>> parse_input("2x3x224x224"), parse_input("2x16:int64:1000")
    (('2x3x224x224', 'float'), ('2x16', 'int64:1000'))
    """
    shape, _, kind = text.partition(":")
    dtype, _, bound = kind.partition(":")
    known = dtype in ("", FLOAT, *WHOLE, *COMPLEX)
    if not known or (bound and not (dtype in WHOLE and bound.isdigit() and int(bound))):
        raise ShardwiseError(
            f"input {text!r}: {kind!r} must be {', '.join((FLOAT, *WHOLE, *COMPLEX))}, and of "
            "whole numbers may have a bound, as in 2x16:int64:1000"
        )
    return shape, kind or FLOAT


def draw_inputs(
    shapes: Sequence[tuple[int, ...]], kinds: Sequence[str], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The same random inputs every time; whole numbers are 0 or 1 where no bound is given.

    Those of kind `FLOAT` are of the dtype that the model is verified in.
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(
        _draw(shape, kind, dtype, generator) for shape, kind in zip(shapes, kinds, strict=True)
    )


def _draw(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    name, _, bound = kind.partition(":")
    if name in WHOLE:
        high = int(bound or 2)
        return torch.randint(high, shape, generator=generator).to(getattr(torch, name))
    wide = torch.complex128 if name in COMPLEX else torch.float64
    drawn = torch.randn(shape, dtype=wide, generator=generator)
    return drawn.to(dtype if name == FLOAT else getattr(torch, name))


@dataclass(frozen=True)
class VerifyRequest:
    """Which model to verify, on how many workers, with which plans.

    Without plans or random ones, the samples are split. What is not given follows from the rest:
    the workers from the plans, the shapes from a plan's file or the zoo. `kinds` are those of the
    inputs, see `parse_input`.
    """

    spec: ModelSpec
    workers: int | None = None
    plans: tuple[PlanSpec, ...] = ()
    num_random: int = 0
    seed: int = 0
    num_steps: int = 3
    training: bool = True
    inference: bool = False
    dtype: str = "float64"
    device: str = "cpu"
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_random < 0:
            raise ShardwiseError(f"{self.num_random} random plans: there cannot be fewer than 0")
        shapes = self.spec.shapes
        if self.kinds and shapes and len(self.kinds) != len(shapes):
            raise ShardwiseError(f"{len(self.kinds)} kinds of {len(shapes)} inputs are given")
        if self.dtype not in DTYPES:
            raise ShardwiseError(f"dtype {self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ShardwiseError(f"device {self.device!r} must be one of {', '.join(DEVICES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ShardwiseError("device 'cuda' is not there; use cpu")


def verify_model(request: VerifyRequest) -> list[PlanResult]:
    """Runs the model under every plan and on one device, and compares all tensors.

    The workers are processes of this machine, or those of a launcher: then rank 0 has the results
    and the other ranks get an empty list.

    >>> [result] = verify_model(VerifyRequest(ModelSpec("digits"), workers=2))
    >>> result.passed
    True
    """
    world = choose_world(request.workers, next((p.num_workers for p in request.plans), None))
    for meant in request.plans:
        meant.check_workers(world)
    model = _model(request)
    jobs = [_job(each, model, world) for each in _of_sizes(request)]
    del model  # every worker builds its own: memory for one less
    cpu = request.device == "cpu" and torch.cuda.is_available()  # else it would take NCCL
    backend = "gloo" if cpu else None
    with _one_sentence(f"{request.spec.model!r} cannot be verified"):  # sending the graph, say
        found = run_on_workers(_compare_jobs, world, jobs, backend=backend) or []
    return [
        PlanResult(label, plan, tuple(tensors))
        for (_, _, plans), comparisons in zip(jobs, found, strict=False)
        for (label, plan), tensors in zip(plans.items(), comparisons, strict=True)
    ]


def _of_sizes(request: VerifyRequest) -> list[VerifyRequest]:
    """For inputs of every size that a plan was made for, if none is asked for."""
    saved = next((meant.saved for meant in request.plans if meant.saved), None)
    if request.spec.shapes or saved is None or not saved.others:
        return [request]
    kinds = request.kinds or saved.dtypes
    sizes = [saved.inputs, *(other.inputs for other in saved.others)]
    return [
        replace(request, spec=replace(request.spec, shapes=size), kinds=kinds) for size in sizes
    ]


Graphs = dict[bool, LayerGraph]  # by whether the model trains
Job = tuple[VerifyRequest, Graphs, dict[str, Plan]]


def _job(request: VerifyRequest, model: nn.Module, world: int) -> Job:
    """What workers do for inputs of one size."""
    request = _with_inputs(request, world)
    graphs = _graphs(request, model)
    return request, graphs, _plans(request, graphs, world)


def _graphs(request: VerifyRequest, model: nn.Module) -> Graphs:
    """The layer graphs that workers need."""
    inputs = _inputs(request)
    saved = [meant.saved for meant in request.plans if meant.saved]
    modes = {request.training, not request.inference, *(plan.training for plan in saved)}
    vary = any(plan.others for plan in saved)
    with _one_sentence(f"{request.spec.model!r} cannot be captured", CaptureError):
        return {
            mode: Captured(model, inputs, mode, sizes_vary=vary or not mode).graph(
                shapes_of(inputs)
            )
            for mode in modes
        }


@contextmanager
def _one_sentence(what: str, kind: type[ShardwiseError] = ShardwiseError) -> Iterator[None]:
    """Within, an error that nobody foresaw is one that says in what it happened."""
    try:
        yield
    except (ShardwiseError, WorkerError):
        raise
    except Exception as error:
        raise kind(f"{what}: {one_line(error)}") from error


def _with_inputs(request: VerifyRequest, world: int) -> VerifyRequest:
    """The request with its input shapes: as asked for, of the plan file, or of the zoo.

    A sample per worker, but two at least: batch norm has no statistics of a single value. Inference
    takes one sample.
    """
    spec, kinds = request.spec, request.kinds
    saved = next((meant.saved for meant in request.plans if meant.saved), None)
    if not spec.shapes and saved:
        spec, kinds = replace(spec, shapes=saved.inputs), kinds or saved.dtypes
    if spec.shapes and spec.batch is not None:
        spec = replace(spec, shapes=tuple((spec.batch, *shape[1:]) for shape in spec.shapes))
    shapes = spec.input_shapes(1 if request.inference else max(2, world))
    kinds = kinds or (FLOAT,) * len(shapes)
    return replace(request, spec=replace(spec, shapes=shapes), kinds=kinds)


def _plans(request: VerifyRequest, graphs: Graphs, world: int) -> dict[str, Plan]:
    """All plans that are asked for, by a label."""
    named, plans, graph = request.plans, {}, graphs[not request.inference]
    if not (named or request.num_random):
        named = (PlanSpec(split={"n": world}),)
    for meant in named:
        own = graph if meant.saved is None else graphs[meant.saved.training]
        shapes = ", ".join("x".join(map(str, shape)) for shape in request.spec.shapes)
        of_size = f", input {shapes}" if meant.saved is not None and meant.saved.others else ""
        plans[f"{meant}{of_size}"] = meant.find(own, world, _search)
    for seed in range(request.seed, request.seed + request.num_random):
        plans[f"random plan, seed {seed}"] = Plan.random(graph, world, seed)
    return plans


def _search() -> Plan:
    raise PlanError("only given plans are verified; `shardwise plan --save` writes the best one")


def _compare_jobs(jobs: Sequence[Job]) -> list[list[list[Comparison]]]:
    """On every rank: all plans for inputs of every size."""
    return [_compare_plans(*job) for job in jobs]


def _compare_plans(
    request: VerifyRequest, graphs: Graphs, plans: Mapping[str, Plan]
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
        with _one_sentence(f"{request.spec.model!r} runs on one device, but not under {label}"):
            own = None if plan.others else known  # which knows of one size only
            how = (request.num_steps, own, request.training, request.inference)
            found.append(compare(model, plan, inputs, comm, *how))
    return found


def _model(request: VerifyRequest) -> nn.Module:
    """The model with the same random weights wherever it is built."""
    torch.manual_seed(0)
    return request.spec.build().to(DTYPES[request.dtype])


def _inputs(request: VerifyRequest) -> tuple[torch.Tensor, ...]:
    return draw_inputs(request.spec.shapes, request.kinds, DTYPES[request.dtype])
