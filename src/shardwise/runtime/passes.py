"""One pass through a parallel model, forward and backward, as a node of the user's autograd graph.

The parameters are inputs of that node: autograd itself adds up their gradients, runs their hooks,
and leaves out what a loss does not depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.attribute_writes import leave
from shardwise.model.capture import Kinds
from shardwise.model.torch_export import Sizes, as_sizes, shapes_of
from shardwise.plans.interpreter import forward
from shardwise.plans.program import Program, layer_layout
from shardwise.runtime.agreement import Intent, agree, together
from shardwise.runtime.backward_pass import Pass, run_backward_pass
from shardwise.runtime.block import Block, plain
from shardwise.runtime.bound import Bound, reached
from shardwise.runtime.compiling import GRAPHS, own_memory
from shardwise.runtime.lowering import Types
from shardwise.runtime.outer_replicas import averages_gradients
from shardwise.runtime.rank_machine import RankMachine, Tensors
from shardwise.runtime.state import State
from shardwise.runtime.wrapping import Wrap, recorded, updated_before_use, watched
from shardwise.tensors import autocast_to, memory_format_of

Inputs = tuple[torch.Tensor, ...]
FORWARD = "the forward pass"
_keep_graph: Any = getattr(torch._C, "_autograd")._get_current_graph_task_keep_graph  # noqa: B009


def run(
    state: State, inputs: Inputs, batch: Sizes | None = None, refusal: Exception | None = None
) -> Any:
    """The model's output for inputs that are whole, or this rank's parts of such a batch.

    Where they cannot be used on one rank (`refusal`), all ranks are told before any waits for it.
    """
    with without_autocast(inputs) as ambient:
        stored = state.blocks.params()
        params: Tensors = {name: p for name, p in stored.items() if p.requires_grad}
        bound, call, autocast = None, Intent(refused=1), state.precision or ambient
        if refusal is None:
            try:
                bound = _bound(state, inputs, batch, stored, autocast)
                call = _call(state, inputs, bound, params, autocast)
            except Exception as error:
                refusal = error
        with state.comm.doing(FORWARD):
            state.blocks.check_values()
            agree(call, refusal, state.comm)
        assert bound is not None
        with together(state.comm, FORWARD):
            _count_batches(bound.counting)
            outputs = _outputs(state, bound, inputs, params, autocast)
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


def _arranged(graph: LayerGraph, outputs: Sequence[torch.Tensor | None]) -> Any:
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


def _bound(
    state: State,
    inputs: Inputs,
    batch: Sizes | None,
    stored: Mapping[str, torch.Tensor],
    autocast: torch.dtype | None,
) -> Bound:
    """The program for these inputs, which are looked at first."""
    if len(inputs) != len(state.plan.inputs):
        raise ShardwiseError(
            f"the model takes {len(state.plan.inputs)} input tensors, and got {len(inputs)}"
        )
    state.blocks.check_shapes(stored)
    sizes = shapes_of(inputs) if batch is None else as_sizes(batch, len(inputs))
    graph = state.programs.graph_for(Kinds.of(inputs, stored, autocast), sizes)
    _check_inputs(state, graph, inputs, whole=batch is None)
    _check_devices(graph.inputs, inputs, stored)
    for name in graph.outputs:
        if graph.batch == 0 and prod(graph[name].shape):
            raise ShardwiseError(
                f"output {name!r} does not consist of samples, and a batch of none was given; "
                "leave such batches out"
            )
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    trainable = frozenset(name for name, param in stored.items() if param.requires_grad)
    return state.programs.bound(graph, trainable, batch is None, needs_gradient)


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
                f"{'x'.join(map(str, x.shape))}"
            )


def _check_devices(names: Sequence[str], inputs: Inputs, stored: Mapping[str, Any]) -> None:
    """Raises where an input is elsewhere than the whole model; numbers may be anywhere."""
    homes = {param.device for param in stored.values() if not param.is_meta}
    for name, x in zip(names, inputs, strict=True):
        if len(homes) == 1 and x.ndim and x.device not in homes:
            home = str(next(iter(homes)))
            raise ShardwiseError(
                f"input {name!r} is on {x.device}, and the model on {home}; give it x.to({home!r})"
            )


def _call(
    state: State, inputs: Inputs, bound: Bound, params: Tensors, autocast: torch.dtype | None
) -> Intent:
    """What this rank is about to do; nobody needs to know it where there is one rank."""
    if state.comm.size == 1:
        return Intent()
    return Intent.of(
        inputs,
        [bound.graph[name].shape for name in bound.graph.inputs],
        whole=bound.program.whole_inputs,
        modes=[module.training for module in state.modules.values()],
        looks=state.programs.looks().tokens,
        trained=list(params),
        autocast=autocast,
    )


def _count_batches(modules: Sequence[Any]) -> None:
    """Batch norm counts the batches it has seen, on ranks without any of its samples too."""
    found = (getattr(module, "num_batches_tracked", None) for module in modules if module.training)
    counters = [counter for counter in found if counter is not None]
    if len(set(map(id, counters))) == len(counters) > 0:
        torch._foreach_add_(counters, 1)
    else:  # a module that runs twice counts twice
        for counter in counters:
            counter.add_(1)


def _outputs(
    state: State, bound: Bound, inputs: Inputs, params: Tensors, autocast: torch.dtype | None
) -> Sequence[torch.Tensor | None]:
    if bound.graph.batch == 0:
        return _of_nothing(bound.graph, inputs, params)
    state.prepare(bound.program)
    leaves = {name: _leaf(param) for name, param in params.items()}
    types = Types(bound.program.dtypes, autocast, inputs[0].device)
    records = torch.is_grad_enabled() and bool(params or any(x.requires_grad for x in inputs))
    machine = RankMachine(bound, types, leaves, _wraps(state), state.mode, state.output, records)
    if records and state.output == "one":
        raise ShardwiseError(
            "output='one' is for inference: a loss that only rank 0 has gives others no gradients; "
            "call the model under torch.no_grad() or torch.inference_mode(), or use output='full'"
        )
    if records:
        at_once = averages_gradients(state.modules.values())
        made = Pass(state, machine, params, state.gradients.holds, at_once)
        anchor = torch.empty(0, requires_grad=True)  # a model may have no parameter at all
        outputs = _Node.apply(made, anchor, *inputs, *params.values())
    else:
        outputs = _forward(machine, inputs)
    if state.output == "one" and state.comm.rank:
        return [None] * len(outputs)
    return [y.float() if y.dtype is state.precision else y for y in outputs]


def _wraps(state: State) -> list[Wrap]:
    """What is done around every layer of the next pass; most often nothing."""
    wraps: list[Wrap] = []
    if state.gradients.delayed.entries and state.gradients.update_delayed:
        wraps.append(partial(updated_before_use, state.gradients.update_used))
    if state.watch is not None:
        wraps.append(partial(watched, state.watch))
    if state.comm.timeline.on:
        wraps.append(partial(recorded, state.comm.timeline))
    return wraps


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
        with torch._C.DisableTorchFunctionSubclass():  # nothing of a block is right, too
            nothing = sum(x.reshape(-1)[:0].sum() for x in sources if x.requires_grad)
        y = inputs[0].new_empty(graph[name].shape, dtype=graph[name].dtype)
        outputs.append(y + nothing if y.is_floating_point() or y.is_complex() else y)
    return outputs


def _forward(machine: RankMachine, inputs: Inputs) -> Inputs:
    program, given = machine.program, dict(zip(machine.program.inputs, inputs, strict=True))
    with autocast_to(inputs[0].device.type, machine.types.autocast):
        values = forward(program, machine, given)
    is_whole = machine.output == "full" or (machine.output == "one" and machine.comm.rank == 0)
    if is_whole:
        values = {name: _shaped(program, name, y) for name, y in values.items()}
    if is_whole and machine.comm.size > 1:
        # One memory format on all ranks, so that their losses agree to the bit.
        values = {name: _formatted_like(inputs[0], y) for name, y in values.items()}
    outputs = [values[name] for name in program.outputs]
    return tuple(own_memory(outputs) if machine.mode in GRAPHS else outputs)


def _shaped(program: Program, name: str, y: torch.Tensor) -> torch.Tensor:
    """A whole output as the model returns it: a scalar, or nothing, has its own shape."""
    shape = () if name in program.scalars else program.layouts[name].shape
    return y.reshape(shape) if y.ndim != len(shape) or not y.numel() else y


def _formatted_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    same_rank = x.ndim == y.ndim
    return y.contiguous(memory_format=memory_format_of(x)) if same_rank else y.contiguous()


# -- backward --------------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    """One pass through the parallel model, as a single node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, made: Pass, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.made = made
        ctx.set_materialize_grads(False)
        program = made.machine.program
        outputs = _forward(made.machine, tensors[: len(program.inputs)])
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
        wanted = ctx.needs_input_grad[2 : 2 + len(made.machine.program.inputs)]
        again = torch.is_grad_enabled()  # create_graph=True
        phase = together(made.state.comm, "the backward pass")
        with torch.no_grad(), without_autocast(gradients), phase:
            found = run_backward_pass(made, gradients, wanted, again)
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
