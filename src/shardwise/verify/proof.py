"""Proof that a plan computes what one device computes; where it does not, the likely cause."""

from __future__ import annotations

import copy
import traceback
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.errors import ShardwiseError, one_line
from shardwise.geometry.box import Box
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import Graphs, ModelGraphs
from shardwise.model.torch_export import shapes_of
from shardwise.plans.plan import Plan
from shardwise.plans.program import layer_layout
from shardwise.runtime.parallel import ParallelModel, of, parallelize
from shardwise.verify.comparison import TOLERANCES, Comparison, differences, distance, size
from shardwise.verify.noise import judge
from shardwise.verify.trial import Found, Trial

COARSE = (torch.bfloat16, torch.float16)
ENOUGH = 1e3  # so many times the usual rounding is a difference, not noise
Pieces = dict[str, tuple[Box, torch.Tensor]]  # of layers' outputs, in the order in which they ran


def compare(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[torch.Tensor, ...],
    comm: Communicator | None = None,
    num_steps: int = 3,
    graphs: Graphs | None = None,
    training: bool = True,
    inference: bool = False,
) -> list[Comparison]:
    """Trains the model with and without the plan and compares everything; rank 0 has the result.

    All ranks call it with the same model and inputs. Where a tensor differs by more than its dtype
    usually rounds, one device is asked what it makes of a change in the last bit, and the tensor is
    judged by that. With training=False only the outputs of evaluation are compared; with
    inference=True under torch.inference_mode, and in 16 bits always with the noise of one device.
    """
    comm = comm or Communicator()
    trial = Trial(inputs, num_steps, training and not inference, inference)
    expected = _reference(model, trial, comm)
    parallel = parallelize(model, plan, comm=comm, graphs=graphs)
    found = trial.run(parallel)
    disagreements = _disagreements(found, parallel, comm)
    results = [] if expected is None else differences(found, expected)
    del parallel, found  # memory for the runs that measure noise
    coarse = inference and any(x.dtype in COARSE for x in inputs)
    if expected is not None and (coarse or not all(c.passed or c.fault for c in results)):
        results = _judged(model, trial, expected, results)
    results += disagreements
    if not any(comm.gather_objects(not all(c.passed for c in results))):
        return results
    cause = likely_cause(model, plan, trial, comm, graphs)
    return [c if c.passed else replace(c, cause=cause) for c in results]


def _judged(
    model: nn.Module, trial: Trial, expected: Found, results: list[Comparison]
) -> list[Comparison]:
    """By the noise of the model, which is no excuse for one that does not repeat itself."""
    if repeats_itself(model, trial):
        return judge(model, trial, expected, results)
    fault = "one device does not repeat it"
    return [c if c.passed or c.fault else replace(c, fault=fault) for c in results]


def _reference(model: nn.Module, trial: Trial, comm: Communicator) -> Found | None:
    """What one device computes, on rank 0; if it cannot, all ranks say why."""
    expected, failure, cause = None, "", None
    if comm.rank == 0:
        twin = model
        try:
            twin = copy.deepcopy(model)
            expected = trial.run(twin)
        except Exception as error:
            failure = f"{type(model).__name__} fails on one device{_place(error, twin)}"
            failure, cause = f"{failure}: {one_line(error)}", error
    failure = comm.gather_objects(failure)[0]
    if failure:
        raise ShardwiseError(failure) from cause
    return expected


def _place(error: Exception, model: nn.Module) -> str:
    """The innermost module that an error went through."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    places = [names.get(id(module)) for module in frames]
    name = next((name for name in reversed(places) if name), None)
    return f" in layer {name!r}" if name else ""


def _disagreements(found: Found, parallel: ParallelModel, comm: Communicator) -> list[Comparison]:
    """Ranks that hold the same part of a tensor must hold the same numbers, to the bit."""
    same = {(*key, ""): _sum(x) for key, x in found.items() if key[0] in ("output", "loss")}
    same |= {("weight", n, str(box)): _sum(x) for n, (box, x) in of(parallel).blocks().items()}
    known: dict[tuple[str, str, str], str] = {}
    different: dict[tuple[str, str], Comparison] = {}
    for everyone in comm.gather_objects(same):
        for (kind, name, box), value in everyone.items():
            if known.setdefault((kind, name, box), value) != value:
                fault = "differs between ranks"
                different[kind, name] = Comparison(kind, name, inf, fault=fault)
    return list(different.values())


def _sum(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    value = value.detach().cpu()
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return repr(float(value.contiguous().double().sum()))


# -- why they differ: the first layer that does, and hints -----------------------------------------


def likely_cause(
    model: nn.Module, plan: Plan, trial: Trial, comm: Communicator, graphs: Graphs | None
) -> str:
    """A few words about why tensors differ, on rank 0; all ranks must call it."""
    graphs = graphs or ModelGraphs(model, plan.inputs, plan.input_dtypes)
    mine, _ = _layers(model, plan, trial, comm, graphs)
    everyone = comm.gather_objects(mine)
    if comm.rank:
        return ""
    if not repeats_itself(model, trial):
        return (
            "one device itself gives something else the next time: random numbers that are not "
            "torch's, or values outside of the model that forward changes"
        )
    expected = trial.forward(copy.deepcopy(model))
    known, sizes = graphs, shapes_of(trial.inputs)
    whole = Plan.uniform(known(True, sizes), 1)
    ((layers, found),) = World(1).run(lambda one: _layers(model, whole, trial, one, known))
    if _differ(differences(found, expected)):
        return _of_capture(known(trial.training, sizes))
    return _first(everyone, layers)


def _layers(
    model: nn.Module, plan: Plan, trial: Trial, comm: Communicator, graphs: Graphs
) -> tuple[Pieces, Found]:
    """This rank's part of what every layer computes in one forward pass, and the outputs."""
    parallel = parallelize(model, plan, comm=comm, graphs=graphs)
    state: Any = parallel.__dict__["_shardwise"]
    parallel.train(trial.training)
    graph = state.programs.graph(trial.training, shapes_of(trial.inputs))
    found: Pieces = {}

    def watch(name: str, y: torch.Tensor) -> None:
        box = layer_layout(graph, of(parallel).plan, name)[comm.rank]
        found[name] = box, y.detach().cpu().clone()

    state.watch = watch
    return found, trial.forward(parallel)


def repeats_itself(model: nn.Module, trial: Trial) -> bool:
    """Whether one device gives the same once more."""
    first, second = (trial.forward(copy.deepcopy(model)) for _ in range(2))
    return not _differ(differences(second, first))


def _differ(results: list[Comparison]) -> bool:
    return any(c.fault or c.error > ENOUGH * c.tolerance for c in results)


def _of_capture(graph: LayerGraph) -> str:
    """Hints at what a graph does not show of a model, though nothing was split."""
    called = [(la.name, la.traits.called or "") for la in graph.layers]
    hints = [f"the function of layer {n!r}" for n, call in called if call.startswith("function_")]
    hints += [f"the attribute {name!r}, which forward sets" for _, name in graph.left]
    hints += ["values that forward reads from outside of the model"]
    return f"it differs on one worker, too, so that capturing it is at fault: {' or '.join(hints)}"


def _first(everyone: list[Pieces], layers: Pieces) -> str:
    """The first layer of which some rank has another part than one worker."""
    for name, (_, whole) in layers.items():
        for rank, pieces in enumerate(everyone):
            box, part = pieces.get(name, (None, None))
            if box is None or part is None or box.empty or tuple(part.shape) != box.shape:
                continue
            expected = whole[box.slices_in(Box.whole(tuple(whole.shape)))]
            limit = ENOUGH * TOLERANCES.get(part.dtype, 0.0) * max(size(whole), 1e-300)
            if distance(part, expected) > limit:
                return f"the first layer that differs is {name!r}, on rank {rank}"
    return "no layer differs in one forward pass: it is in gradients, statistics or later steps"
