"""The way back of a pass: gradients of inputs and parameters, and the sums that these need."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.comm import About
from shardwise.errors import ShardwiseError
from shardwise.plans.interpreter import backward
from shardwise.plans.program import Program
from shardwise.runtime.agreement import Disagreement, together
from shardwise.runtime.gradient_sums import GradientSums
from shardwise.runtime.loss_agreement import LossAgreement
from shardwise.runtime.rank_machine import RankMachine, Tensors
from shardwise.runtime.state import State
from shardwise.runtime.unsummed import hold, refusal, release, unsummed


@dataclass
class Pass:
    """What a pass keeps for its way back."""

    state: State
    machine: RankMachine
    params: Tensors
    holds: bool = False  # it was made under no_sync()
    at_once: bool = False  # its gradients are averaged over replicas: nothing may come later
    spent: bool = False  # its way back has been gone, and nothing was retained


def run_backward_pass(
    made: Pass, gradients: Sequence[Any], wanted: Sequence[bool], at_once: bool
) -> list[Any]:
    """The gradients of the inputs, and those of the parameters unless they come later."""
    state, machine, program = made.state, made.machine, made.machine.program
    at_once |= made.at_once
    holds = made.holds and state.gradients.holds and not at_once and not _autograd_wants(made)
    entry, used = _enter(program, gradients, holds, state)
    reached = machine.bound.reached(used)
    state.gradients.begin_backward()
    begin = time.perf_counter()
    sums = state.gradients.sums(machine.bound, made.params, entry.all_hold())
    waited = {} if sums.held else _taken_up(made, sums)
    parts = {name: machine.zeros(name) for name in reached.empty} | _own_parts(machine, gradients)
    back = machine.turned(sums, keeps=not made.spent)
    inputs = backward(program, back, parts, reached.positions) | back.whole_gradients
    if made.spent:
        machine.tapes.clear()
        machine.kept.clear()
    try:
        entry.check()
    except Disagreement:  # all ranks stay in step
        sums.wait()
        raise
    for name in waited:
        release(made.params[name])
    found = _finished(made, sums, reached.params | waited.keys(), at_once, begin)
    summed = [
        _input_gradient(state, program, name, inputs.get(name)) if needed else None
        for name, needed in zip(program.inputs, wanted, strict=True)
    ]
    for name in reached.params & made.params.keys():
        leaf = machine.leaves[name]
        if not leaf.numel():  # this rank has none of it to sum, and optimizers do as all others
            found[name] = torch.zeros_like(leaf)
    return [*summed, *(found.pop(name, None) for name in made.params)]


def _finished(
    made: Pass, sums: GradientSums, stored: Collection[str], at_once: bool, begin: float
) -> Tensors:
    """The gradients that autograd is to add up: not those that wait for their sums."""
    state, gradients = made.state, made.state.gradients
    delayed = gradients.delayed if gradients.update_delayed and not made.at_once else None
    if sums.held:
        found = sums.finish(stored, delayed)
        for name in found.keys() & sums.views.keys():
            hold(name, made.params[name], found.pop(name))
        _holding.add(state)
        return found
    at_once |= any(param.is_leaf and param.grad is not None for param in made.params.values())
    wait = gradients.choice.engine.wait
    if wait != "backward" and (at_once or not gradients.choice.decided or _autograd_wants(made)):
        wait = "backward"
    found = sums.finish(stored, delayed, wait)
    if wait != "backward":
        for name, gradient in sums.handed_out(found).items():  # autograd would read what is summed
            made.params[name].grad = gradient
        found, gradients.unfinished = {}, sums
        _unfinished.add(state)
    gradients.choice.note(time.perf_counter() - begin)
    return found


def _taken_up(made: Pass, sums: GradientSums) -> Tensors:
    """What passes under no_sync() have left goes into the sums of this pass."""
    waiting = unsummed(made.params) if made.state in _holding else {}
    waiting = {name: waiting[name] for name in waiting.keys() & sums.views.keys()}
    if waiting and _autograd_wants(made):
        filled = [name for name in waiting if _is_filled(made.params[name])]
        if filled:
            raise ShardwiseError(
                f"{refusal(filled)}; that pass must fill all parameters, which may have no hooks"
            )
        return {}
    for name in sorted(waiting):
        sums.add(name, waiting[name]._part)
    return {**waiting}


def _autograd_wants(made: Pass) -> bool:
    """Whether the gradients of parameters are for others than their `.grad`: a hook, say."""
    params = list(made.params.values())
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
        return True
    return not all(map(_is_filled, params))


def _is_filled(param: torch.Tensor) -> bool:
    """Whether the backward pass that is under way adds to the `.grad` of this parameter."""
    try:
        with torch._C.DisableTorchFunctionSubclass():  # blocks refuse what torch does to find it
            node = get_gradient_edge(param).node
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad, of this very parameter
        return False


def _enter(
    program: Program, gradients: Sequence[Any], holds: bool, state: State
) -> tuple[LossAgreement, list[str]]:
    """What all ranks go back with, and the outputs that the loss of any of them depends on."""
    named = zip(program.outputs, gradients, strict=True)
    known = [(name, g) for name, g in named if name in program.differentiable]
    entry = LossAgreement([g for _, g in known], holds, state.output == "full", state.comm)
    flags = zip(known, entry.used(), strict=True)
    return entry, list(dict.fromkeys(name for (name, _), is_used in flags if is_used))


def _own_parts(machine: RankMachine, gradients: Sequence[Any]) -> Tensors:
    """Every rank has the gradient of the whole output and takes its own part: no sum."""
    parts: Tensors = {}
    program, own = machine.program, machine.bound.own_parts
    for name, gradient in zip(program.outputs, gradients, strict=True):
        if gradient is not None:
            if machine.output == "full":
                gradient = gradient.reshape(program.layouts[name].shape)[own[name]]
            parts[name] = parts[name] + gradient if name in parts else gradient
    return parts


def _input_gradient(state: State, program: Program, name: str, gradient: Any) -> Any:
    """The gradient of an input that is whole on every rank is the sum of all parts."""
    if gradient is not None and program.whole_inputs:
        everybody = tuple(range(state.comm.size))
        state.comm.all_reduce(everybody, gradient, About(f"{name} gradient")).wait()
    return gradient


_unfinished: WeakSet[State] = WeakSet()  # of models whose sums may still be under way
_holding: WeakSet[State] = WeakSet()  # of models whose gradients may wait for sums


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Every optimizer waits for the sums of its own parameters, which must have begun."""
    if not _unfinished and not _holding:
        return
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for state in list(_unfinished):
        state.gradients.wait(own)
    for state in list(_holding):
        with together(state.comm, "an optimizer's step"):
            check_summed(state, own)


def check_summed(state: State, params: Collection[int] | None = None) -> None:
    """Raises where gradients of parameters with these ids, or of any, wait for their sums."""
    named = state.blocks.params()
    waiting = unsummed(named)
    if not waiting:
        _holding.discard(state)
    names = [name for name in waiting if params is None or id(named[name]) in params]
    if names:
        raise refusal(names)


register_optimizer_step_pre_hook(_before_step)
