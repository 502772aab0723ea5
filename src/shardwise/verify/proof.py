"""Proof that a plan computes what one device computes."""

from __future__ import annotations

import copy
import traceback
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError, one_line
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import Graphs, ParallelModel, of, parallelize
from shardwise.verify.cause import likely_cause, repeats_itself
from shardwise.verify.comparison import Comparison, differences
from shardwise.verify.noise import judge
from shardwise.verify.trial import Found, Trial


def compare(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[torch.Tensor, ...],
    comm: Communicator | None = None,
    num_steps: int = 3,
    graphs: Graphs | None = None,
    training: bool = True,
) -> list[Comparison]:
    """Trains the model with and without the plan and compares everything; rank 0 has the result.

    All ranks call it with the same model and inputs. Where a tensor differs by more than its dtype
    usually rounds, one device is asked what it makes of a change in the last bit, and the tensor is
    judged by that. With training=False only the outputs of evaluation are compared.
    """
    comm = comm or Communicator()
    trial = Trial(inputs, num_steps, training)
    expected = _reference(model, trial, comm)
    parallel = parallelize(model, plan, comm=comm, graphs=graphs)
    found = trial.run(parallel)
    disagreements = _disagreements(found, parallel, comm)
    results = [] if expected is None else differences(found, expected)
    del parallel, found  # memory for the runs that measure noise
    if expected is not None and not all(c.passed or c.fault for c in results):
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
