"""Why a plan may not compute what one device computes: the first layer that differs, and hints."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.geometry.box import Box
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import Graphs, ModelGraphs
from shardwise.plans.plan import Plan
from shardwise.plans.program import layer_layout
from shardwise.runtime.parallel import of, parallelize
from shardwise.verify.comparison import TOLERANCES, Comparison, differences, distance, size
from shardwise.verify.trial import Found, Trial

ENOUGH = 1e3  # so many times the usual rounding is a difference, not noise
Pieces = dict[str, tuple[Box, torch.Tensor]]  # of layers' outputs, in the order in which they ran


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
    known, samples = graphs, trial.inputs[0].shape[0]
    whole = Plan.uniform(known(True, samples), 1)
    ((layers, found),) = World(1).run(lambda one: _layers(model, whole, trial, one, known))
    if _differ(differences(found, expected)):
        return _of_capture(known(trial.training, samples))
    return _first(everyone, layers)


def _layers(
    model: nn.Module, plan: Plan, trial: Trial, comm: Communicator, graphs: Graphs
) -> tuple[Pieces, Found]:
    """This rank's part of what every layer computes in one forward pass, and the outputs."""
    parallel = parallelize(model, plan, comm=comm, graphs=graphs)
    state: Any = parallel.__dict__["_shardwise"]
    parallel.train(trial.training)
    graph = state.programs.graph(trial.training, trial.inputs[0].shape[0])
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
