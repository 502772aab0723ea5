"""One pass through a parallel model, forward and backward, as a node of the user's autograd graph.

The parameters are inputs of that node: autograd itself adds up their gradients, runs their hooks,
and leaves out what a loss does not depend on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from shardwise.agreement import Call, Disagreement, agree, checksum, together
from shardwise.block import Block, plain
from shardwise.box import Box
from shardwise.comm import About
from shardwise.entering import Entry
from shardwise.errors import PlanError, ShardwiseError
from shardwise.exchange import start
from shardwise.formats import memory_format_of
from shardwise.gradients import GradientSums, reached
from shardwise.graph import LayerGraph
from shardwise.program import Program, Source, layer_layout, to_all
from shardwise.runtime import Bound, Runtime, Tensors
from shardwise.state import State
from shardwise.unsummed import hold, refusal, release, unsummed
from shardwise.writing import leave

Inputs = tuple[torch.Tensor, ...]
FORWARD = "the forward pass"
_keep_graph: Any = getattr(torch._C, "_autograd")._get_current_graph_task_keep_graph  # noqa: B009


def run(
    state: State, inputs: Inputs, batch: int | None = None, refusal: Exception | None = None
) -> Any:
    """The model's output for inputs that are whole, or this rank's part of so many samples.

    Where they cannot be used on one rank (`refusal`), all ranks are told before any waits for it.
    """
    with without_autocast(inputs) as lower:
        params: Tensors = {n: p for n, p in state.params().items() if p.requires_grad}
        bound, call, precision = None, Call(refused=1), state.precision
        if refusal is None:
            try:
                bound = _bound(state, inputs, batch, frozenset(params))
                precision = precision or _precision(lower, inputs, state)
                call = _call(state, inputs, batch, params, precision)
            except Exception as error:
                refusal = error
        with state.comm.doing(FORWARD):
            state.check_values()
            agree(call, refusal, state.comm)
        assert bound is not None
        with together(state.comm, FORWARD):
            _count_batches(bound.graph, state)
            outputs = _outputs(state, bound, inputs, params, precision)
        leave(bound.graph.left, state.modules)
        return _arranged(bound.graph, outputs)


@contextmanager
def without_autocast(tensors: Sequence[Any]) -> Iterator[torch.dtype | None]:
    """Within, layers get the types that they are given; says what torch.autocast would lower to."""
    kinds = {x.device.type for x in tensors if x is not None}
    known = filter(torch.amp.is_autocast_available, kinds)
    kind = next((kind for kind in known if torch.is_autocast_enabled(kind)), None)
    if kind is None:
        yield None
    else:
        lower = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            yield lower


def _precision(lower: torch.dtype | None, inputs: Inputs, state: State) -> torch.dtype | None:
    """What torch.autocast around the model means: it leaves alone what is float64."""
    if lower is None or any(x.dtype is torch.float64 for x in (*inputs, *state.params().values())):
        return None
    if lower is not torch.bfloat16:
        raise ShardwiseError(
            f"torch.autocast to {str(lower).removeprefix('torch.')} around a parallel model, which "
            "computes in bfloat16 or as it is: give it dtype=torch.bfloat16, or leave it out"
        )
    return lower


def _arranged(graph: LayerGraph, outputs: Sequence[torch.Tensor]) -> Any:
    """Outputs in the structure in which the model's forward returns them."""
    leaves: list[Any] = list(outputs)
    for place, value in graph.numbers.items():
        leaves.insert(place, value)
    return _unflattened(iter(leaves), graph.output_spec)


def _unflattened(leaves: Iterator[Any], spec: Any) -> Any:
    """As pytree does it, which makes a plain tuple of a torch.Size."""
    if spec.is_leaf():
        return next(leaves)
    parts = [_unflattened(leaves, child) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(parts)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


def _bound(state: State, inputs: Inputs, batch: int | None, trainable: frozenset[str]) -> Bound:
    """The program for these inputs, which are looked at first."""
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 0):
        raise ShardwiseError(f"batch={batch!r} must be the number of samples of all parts")
    if len(inputs) != len(state.plan.inputs):
        raise ShardwiseError(
            f"the model takes {len(state.plan.inputs)} input tensors, and got {len(inputs)}"
        )
    _check_held(state)
    samples = _num_samples(inputs, batch)
    graph = state.graph_for(inputs, samples)
    _check_inputs(state, graph, inputs, whole=batch is None)
    for name in graph.outputs:
        if samples == 0 and prod(graph[name].shape):
            raise ShardwiseError(
                f"output {name!r} does not consist of samples, and a batch of none was given; "
                "leave such batches out"
            )
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return state.bound(graph, trainable, batch is None, needs_gradient)


def _check_held(state: State) -> None:
    """Parameters may have been replaced, by whole ones say."""
    for name, param in state.params().items():
        held = state.held_shapes.get(name, param.shape)
        if param.shape != held and param.ndim:
            found, wanted = ("x".join(map(str, shape)) for shape in (param.shape, held))
            raise ShardwiseError(
                f"the model has parameters of other shapes than before: {name!r} is {found}, and "
                f"this rank's block of it {wanted}; load_state_dict takes whole ones"
            )


def _num_samples(inputs: Inputs, batch: int | None) -> int:
    return batch if batch is not None else next((x.shape[0] for x in inputs if x.ndim), 0)


def _check_inputs(state: State, graph: LayerGraph, inputs: Inputs, whole: bool) -> None:
    for name, x in zip(graph.inputs, inputs, strict=True):
        if x.layout is not torch.strided:
            raise ShardwiseError(f"input {name!r} is {x.layout}, and must be dense: x.to_dense()")
        wanted = graph[name].shape
        if not whole:
            wanted = layer_layout(graph, state.plan, name)[state.comm.rank].shape
        if tuple(x.shape) != wanted:
            part = "" if whole else " as this rank's part"
            raise ShardwiseError(
                f"input {name!r} must be {'x'.join(map(str, wanted))}{part}, and is "
                f"{'x'.join(map(str, x.shape))}; a plan is for one image size"
            )


def _call(
    state: State, inputs: Inputs, batch: int | None, params: Tensors, precision: torch.dtype | None
) -> Call:
    """What this rank is about to do; nobody needs to know it where there is one rank."""
    if state.comm.size == 1:
        return Call()
    whole = batch is None
    return Call(
        samples=_num_samples(inputs, batch),
        training=state.training,
        gradients=torch.is_grad_enabled(),
        whole=whole,
        modes=checksum([module.training for module in state.modules.values()]),
        attributes=checksum(state.looks().tokens),
        trained=checksum([[*params], [x.requires_grad for x in inputs]]),
        kinds=checksum([(x.dtype, tuple(x.shape) if whole else x.ndim) for x in inputs]),
        content=checksum([checksum(x) for x in inputs]) if whole else 0,
        lowered=precision is not None,
    )


def _count_batches(graph: LayerGraph, state: State) -> None:
    """Batch norm counts the batches it has seen, on ranks without any of its samples too."""
    for layer in graph.layers:
        if layer.op == "batch_norm":
            module = state.modules[layer.attrs["module"]]
            counter = getattr(module, "num_batches_tracked", None)
            if counter is not None and module.training:
                counter.add_(1)


def _outputs(
    state: State, bound: Bound, inputs: Inputs, params: Tensors, precision: torch.dtype | None
) -> Sequence[torch.Tensor]:
    if bound.graph.batch == 0:
        return _of_nothing(bound.graph, inputs, params)
    state.prepare(bound.program)
    leaves = {name: _leaf(param) for name, param in params.items()}
    lookup = partial(_lookup, state, bound.graph.constants, leaves)
    runtime = Runtime(bound, lookup, precision, state.watch)
    if torch.is_grad_enabled() and (params or any(x.requires_grad for x in inputs)):
        made = Pass(state, runtime, params, leaves, state.holds)
        anchor = torch.empty(0, requires_grad=True)  # a model may have no parameter at all
        return _Node.apply(made, anchor, *inputs, *params.values())
    return _forward(state, runtime, inputs, record=False)


def _leaf(param: torch.Tensor) -> torch.Tensor:
    """The parameter as layers see it: its hooks are for the whole gradient, not for parts of it."""
    own = isinstance(param, Block) or param._backward_hooks
    return plain(param).requires_grad_() if own else param


def _of_nothing(graph: LayerGraph, inputs: Inputs, params: Tensors) -> list[torch.Tensor]:
    """The outputs for a batch of no samples, of which no rank has anything to compute."""
    outputs = []
    for name in graph.outputs:
        _, used = reached(graph, [name])
        sources = [*inputs, *(param for n, param in params.items() if n in used)]
        nothing = sum(x.reshape(-1)[:0].sum() for x in sources if x.requires_grad)
        y = inputs[0].new_empty(graph[name].shape, dtype=graph[name].dtype)
        outputs.append(y + nothing if y.is_floating_point() or y.is_complex() else y)
    return outputs


def _lookup(
    state: State, constants: Mapping[str, torch.Tensor], params: Tensors, source: Source
) -> torch.Tensor:
    """The part of a stored tensor that a layer needs."""
    if source.kind == "constant":
        tensor = constants[source.name]
        held = Box.whole(tuple(tensor.shape))
    else:
        if state.late.entries and source.name in state.late.names and state.settle:
            state.settle(frozenset([source.name]))  # its last update was put off until now
        path, _, leaf = source.name.rpartition(".")
        tensor = params.get(source.name)
        tensor = getattr(state.modules[path], leaf) if tensor is None else tensor
        tensor = plain(tensor) if isinstance(tensor, Block) else tensor
        layout = state.layouts.get(source.name)
        held = Box.whole(tuple(tensor.shape)) if layout is None else layout[state.comm.rank]
    if tensor.ndim == 0 or held == source.box:
        return tensor
    if not held.contains(source.box):
        raise PlanError(
            f"rank {state.comm.rank} holds {held} of {source.name!r} and needs {source.box}"
        )
    return tensor[source.box.slices_in(held)]


def _forward(state: State, runtime: Runtime, inputs: Inputs, record: bool) -> Inputs:
    program = runtime.program
    values = runtime.forward(dict(zip(program.inputs, inputs, strict=True)), record)
    if state.output == "full":
        full = [
            start(to_all(program.layouts[name]), y, state.comm, About(f"{name} to all"))
            for name, y in values.items()
        ]
        arrived = zip(values, full, strict=True)
        values = {name: _shaped(program, name, wait()) for name, wait in arrived}
    if state.output == "full" and state.comm.size > 1:
        # One memory format on all ranks, so that their losses agree to the bit.
        values = {name: _formatted_like(inputs[0], y) for name, y in values.items()}
    outputs = [values[name] for name in program.outputs]
    return tuple(y.float() if y.dtype == runtime.precision else y for y in outputs)


def _shaped(program: Program, name: str, y: torch.Tensor) -> torch.Tensor:
    """A whole output as the model returns it: a scalar, or nothing, has its own shape."""
    shape = () if name in program.scalars else program.layouts[name].shape
    return y.reshape(shape) if y.ndim != len(shape) or not y.numel() else y


def _formatted_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    same_rank = x.ndim == y.ndim
    return y.contiguous(memory_format=memory_format_of(x)) if same_rank else y.contiguous()


# -- backward --------------------------------------------------------------------------------------


@dataclass
class Pass:
    """What a pass keeps for its way back."""

    state: State
    runtime: Runtime
    params: Tensors
    leaves: Tensors  # the parameters as layers saw them
    holds: bool = False  # it was made under no_sync()
    spent: bool = False  # its way back has been gone, and nothing was retained


class _Node(torch.autograd.Function):
    """One pass through the parallel model, as a single node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, made: Pass, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.made = made
        ctx.set_materialize_grads(False)
        inputs = tensors[: len(made.runtime.program.inputs)]
        outputs = _forward(made.state, made.runtime, inputs, record=True)
        program = made.runtime.program
        named = zip(program.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(y for name, y in named if name not in program.differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        made: Pass = ctx.made
        if made.spent:
            raise ShardwiseError(
                f"backward through the same forward pass of the parallel {made.state.name} a "
                "second time: give the first one retain_graph=True, or add up the losses"
            )
        made.spent = not _keep_graph()
        wanted = ctx.needs_input_grad[2 : 2 + len(made.runtime.program.inputs)]
        again = torch.is_grad_enabled()  # create_graph=True
        phase = together(made.state.comm, "the backward pass")
        with torch.no_grad(), without_autocast(gradients), phase:
            found = _backward(made, gradients, wanted, again)
        if again:
            found = _First.apply(made.state.name, torch.empty(0, requires_grad=True), *found)
        return None, None, *found


class _First(torch.autograd.Function):
    """Gradients that are first derivatives, and have none themselves."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: torch.Tensor, *gradients: Any) -> Any:
        ctx.name = name
        return tuple(g.view_as(g) if g is not None else None for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ShardwiseError(
            f"the parallel {ctx.name} has first derivatives only: the gradients that it gave with "
            "create_graph=True cannot be differentiated again; compute terms that need second "
            "derivatives (gradient penalties, say) with the original model"
        )


def _backward(
    made: Pass, gradients: Sequence[Any], wanted: Sequence[bool], at_once: bool
) -> list[Any]:
    """The gradients of the inputs, and those of the parameters unless they come later."""
    state, runtime, program = made.state, made.runtime, made.runtime.program
    holds = made.holds and state.holds and not at_once and not _autograd_wants(made)
    entry, used = _enter(program, gradients, holds, state)
    values, stored = reached(runtime.bound.graph, [program.origins[name] for name in used])
    state.wait_for_sums()  # of a step before, whose buffers are used again
    if state.settle is not None and state.choice.engine.wait == "use":
        state.settle(None)
    begin = time.perf_counter()
    sums = state.gradient_sums(runtime.bound, made.params, entry.all_hold())
    waited = {} if sums.held else _taken_up(made, sums)
    parts = _own_parts(program, gradients, state.output == "full")
    inputs = runtime.backward(parts, made.leaves, sums, values, keep=not made.spent)
    try:
        entry.check()
    except Disagreement:  # all ranks stay in step
        sums.wait()
        raise
    for name in waited:
        release(made.params[name])
    found = _finished(made, sums, stored | waited.keys(), at_once, begin)
    summed = [
        _input_gradient(state, program, name, inputs.get(name)) if needed else None
        for name, needed in zip(program.inputs, wanted, strict=True)
    ]
    for name in stored & made.params.keys():
        leaf = made.leaves[name]
        if not leaf.numel():  # this rank has none of it to sum, and optimizers do as all others
            found[name] = torch.zeros_like(leaf)
    return [*summed, *(found.pop(name, None) for name in made.params)]


def _finished(
    made: Pass, sums: GradientSums, stored: set[str], at_once: bool, begin: float
) -> Tensors:
    """The gradients that autograd is to add up: not those that wait for their sums."""
    state = made.state
    delayed = state.late if state.settle else None
    if sums.held:
        found = sums.finish(stored, delayed)
        for name in found.keys() & sums.views.keys():
            hold(name, made.params[name], found.pop(name))
        _holding.add(state)
        return found
    at_once |= any(param.is_leaf and param.grad is not None for param in made.params.values())
    wait = state.choice.engine.wait
    if wait != "backward" and (at_once or not state.choice.decided or _autograd_wants(made)):
        wait = "backward"
    found = sums.finish(stored, delayed, wait)
    if wait != "backward":
        for name, gradient in found.items():  # autograd would read what is still summed
            made.params[name].grad = gradient
        found, state.unfinished = {}, sums
        _unfinished.add(state)
    state.choice.note(time.perf_counter() - begin)
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
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch.autograd.grad, of this very parameter
        return False


def _enter(
    program: Program, gradients: Sequence[Any], holds: bool, state: State
) -> tuple[Entry, list[str]]:
    """What all ranks go back with, and the outputs that the loss of any of them depends on."""
    named = zip(program.outputs, gradients, strict=True)
    known = [(name, g) for name, g in named if name in program.differentiable]
    entry = Entry([g for _, g in known], holds, state.output == "full", state.comm)
    flags = zip(known, entry.used(), strict=True)
    return entry, list(dict.fromkeys(name for (name, _), is_used in flags if is_used))


def _own_parts(program: Program, gradients: Sequence[Any], full: bool) -> Tensors:
    """Every rank has the gradient of the whole output and takes its own part: no sum."""
    parts: Tensors = {}
    for name, gradient in zip(program.outputs, gradients, strict=True):
        if gradient is not None:
            if full:
                whole = Box.whole(program.layouts[name].shape)
                gradient = gradient.reshape(whole.shape)[program.boxes[name].slices_in(whole)]
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
        state.wait_for_sums(own)
    for state in list(_holding):
        with together(state.comm, "an optimizer's step"):
            check_summed(state, own)


def check_summed(state: State, params: Collection[int] | None = None) -> None:
    """Raises where gradients of parameters with these ids, or of any, wait for their sums."""
    named = state.params()
    waiting = unsummed(named)
    if not waiting:
        _holding.discard(state)
    names = [name for name in waiting if params is None or id(named[name]) in params]
    if names:
        raise refusal(names)


register_optimizer_step_pre_hook(_before_step)
