"""`parallelize`: an nn.Module that computes on many workers exactly what it computed on one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from shardwise.box import Box
from shardwise.cluster import Cluster
from shardwise.comm import About, Communicator
from shardwise.engine import Engine
from shardwise.errors import PlanError, ShardwiseError
from shardwise.exchange import start
from shardwise.formats import memory_format_of
from shardwise.graph import LayerGraph
from shardwise.plan import Plan
from shardwise.program import Program, Source, to_all
from shardwise.runtime import Runtime, Tensors
from shardwise.split_model import SplitModel
from shardwise.state import Graphs, ModelGraphs, State
from shardwise.trace import Trace


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    output: Literal["full", "local"] = "full",
    comm: Communicator | None = None,
    graphs: Graphs | None = None,
    gradients: Engine | None = None,
    cluster: Cluster | str | None = None,
    precision: Literal["bf16"] | None = None,
) -> ParallelModel:
    """Wraps a model so that it runs as the plan says; the model itself is left as it was.

    All ranks start from rank 0's parameters and buffers. With output="full" every rank returns the
    whole output and computes the same loss; with "local" each returns its own part. `graphs` saves
    capturing the model again where that was done before; `gradients` says when they are summed,
    and the measurements of a `cluster` by which algorithms (see `shardwise probe --sums`). With
    precision="bf16" layers compute in bfloat16 (norms and softmax in float32); parameters, their
    gradients and the output stay float32.

    >>> model = parallelize(nn.Sequential(nn.Linear(4, 2)), plan)
    """
    graphs = graphs or ModelGraphs(model, plan.inputs)
    comm = (comm or Communicator()).summing_as(cluster)
    return ParallelModel(model, plan, output, comm, graphs, gradients or Engine(), precision)


ANOTHER_BATCH = (
    "was given another batch than rank 0; give every rank the same global batch, or each its own "
    "part with batch="
)


class ParallelModel(SplitModel):
    """A model that runs as its plan says: this rank's part of it."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        output: str,
        comm: Communicator,
        graphs: Graphs,
        engine: Engine,
        precision: str | None = None,
    ) -> None:
        if plan.world != comm.size:
            raise PlanError(
                f"the plan is for {plan.world} workers, but {comm.size} are running; start "
                f"{plan.world}, or make a plan for {comm.size}"
            )
        super().__init__(model, State(plan, output, comm, graphs, engine, precision))

    def forward(self, *inputs: torch.Tensor, batch: int | None = None) -> Any:
        """The model's output for the global batch.

        Give either the global batch on every rank, or, with `batch=`, this rank's part of it
        (see `input_box`).
        """
        state = self._shardwise
        if len(inputs) != len(state.plan.inputs):
            raise ShardwiseError(
                f"the model takes {len(state.plan.inputs)} input tensors, and got {len(inputs)}"
            )
        samples = inputs[0].shape[0] if batch is None else batch
        graph = state.graph(self.training, samples)
        self._check_inputs(graph, inputs, whole=batch is None)
        self._count_batches(graph)
        needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        bound = state.bound(graph, self._trainable(), batch is None, needs_gradient)
        key = (self.training, samples, batch is None)
        if key not in state.ready:
            self._get_ready(bound.program, inputs, whole=batch is None)
            state.ready.add(key)
        lookup = partial(self._lookup, graph.constants)
        runtime = Runtime(bound, lookup, state.precision, state.watch)
        if torch.is_grad_enabled():
            anchor = torch.empty(0, requires_grad=True)
            outputs = _Run.apply(self, runtime, anchor, *inputs)
        else:
            outputs = self._forward(runtime, inputs, record=False)
        return pytree.tree_unflatten(list(outputs), graph.output_spec)

    def _get_ready(self, program: Program, inputs: tuple[torch.Tensor, ...], whole: bool) -> None:
        """Before a program's first run: its process groups, and a check of what the ranks got."""
        state = self._shardwise
        if whole:
            sums = repr([float(x.detach().double().sum()) for x in inputs])
            state.agree(sums, ANOTHER_BATCH)
        state.comm.prepare(program.groups)
        segments = {ranks for layout in program.params.values() for ranks in layout.segments}
        state.lane.prepare(sorted(segments))

    def first_not_finite(self, *inputs: torch.Tensor, batch: int | None = None) -> str | None:
        """The first layer whose output is not finite for this batch; all ranks must call it."""
        state, found = self._shardwise, set()

        def watch(layer: str, y: torch.Tensor) -> None:
            if y.is_floating_point() and not bool(y.isfinite().all()):
                found.add(layer)

        state.watch = watch
        try:
            with torch.no_grad():
                self(*inputs, batch=batch)
        finally:
            state.watch = None
        anywhere = set().union(*state.comm.gather_objects(found))
        graph = state.graph(self.training, inputs[0].shape[0] if batch is None else batch)
        return next((layer.name for layer in graph.layers if layer.name in anywhere), None)

    def input_box(self, batch: int, index: int = 0) -> Box:
        """The part of a global batch that this rank reads when it is given parts."""
        program = self._parts_program(batch)
        return program.boxes[program.inputs[index]]

    def output_box(self, batch: int, index: int = 0) -> Box:
        """The part of an output that this rank returns with output="local"."""
        program = self._parts_program(batch)
        return program.boxes[program.outputs[index]]

    def _parts_program(self, batch: int) -> Program:
        state = self._shardwise
        graph = state.graph(self.training, batch)
        return state.bound(graph, self._trainable(), False, False).program

    def _check_inputs(
        self, graph: LayerGraph, inputs: tuple[torch.Tensor, ...], whole: bool
    ) -> None:
        for index, (name, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
            wanted = graph[name].shape
            if not whole:
                wanted = self.input_box(graph.batch, index).shape
            if tuple(x.shape) != wanted:
                part = "" if whole else " as this rank's part"
                raise ShardwiseError(
                    f"input {name!r} must be {'x'.join(map(str, wanted))}{part}, and is "
                    f"{'x'.join(map(str, x.shape))}; a plan is for one image size"
                )

    def _forward(
        self, runtime: Runtime, inputs: tuple[torch.Tensor, ...], record: bool
    ) -> tuple[torch.Tensor, ...]:
        state, program = self._shardwise, runtime.program
        values = runtime.forward(dict(zip(program.inputs, inputs, strict=True)), record)
        if state.output == "full":
            layouts = program.layouts
            full = [
                start(to_all(layouts[name]), y, state.comm, About(f"{name} to all"))
                for name, y in values.items()
            ]
            values = {
                name: self._shaped(program, name, wait())
                for name, wait in zip(values, full, strict=True)
            }
        if state.output == "full" and state.comm.size > 1:
            # One memory format on all ranks, so that their losses agree to the bit.
            values = {name: _formatted_like(inputs[0], y) for name, y in values.items()}
        outputs = [values[name] for name in program.outputs]
        return tuple(y.float() if y.dtype == state.precision else y for y in outputs)

    @staticmethod
    def _shaped(program: Program, name: str, y: torch.Tensor) -> torch.Tensor:
        """A whole output as the model returns it: a scalar, or nothing, has its own shape."""
        shape = () if name in program.scalars else program.layouts[name].shape
        return y.reshape(shape) if y.ndim != len(shape) or not y.numel() else y

    def _backward(self, runtime: Runtime, gradients: tuple[Any, ...]) -> list[Any]:
        """Every rank has the gradient of the whole output and takes its own part: no sum."""
        state, program = self._shardwise, runtime.program
        parts: Tensors = {}
        for name, gradient in zip(program.outputs, gradients, strict=True):
            if gradient is None:
                continue
            if state.output == "full":
                whole = Box.whole(program.layouts[name].shape)
                gradient = gradient.reshape(whole.shape)[program.boxes[name].slices_in(whole)]
            parts[name] = parts[name] + gradient if name in parts else gradient
        self._wait_for_sums()  # of a step before, whose buffers are used again
        if state.settle is not None and state.choice.engine.wait == "use":
            state.settle(None)
        params: Tensors = {n: p for n, p in self._params().items() if p.requires_grad}
        # Gradients of an earlier backward pass lie where those of this one will be put.
        before = {n: p.grad.clone() for n, p in params.items() if p.grad is not None}
        begin = time.perf_counter()
        sums = state.gradient_sums(program, params)
        inputs = runtime.backward(parts, params, sums)
        at_once = bool(before) or not state.choice.decided
        wait = "backward" if at_once else state.choice.engine.wait
        for name, gradient in sums.finish(state.late if state.settle else None, wait).items():
            params[name].grad = gradient.add_(before[name]) if name in before else gradient
        if wait != "backward":
            state.unfinished = sums
            _unfinished.add(self)
        state.choice.note(time.perf_counter() - begin)
        return [self._input_gradient(program, name, inputs.get(name)) for name in program.inputs]

    def _input_gradient(self, program: Program, name: str, gradient: Any) -> Any:
        """The gradient of an input that is whole on every rank is the sum of all parts."""
        if gradient is not None and program.whole_inputs:
            comm = self._shardwise.comm
            everybody = tuple(range(comm.size))
            comm.all_reduce(everybody, gradient, About(f"{name} gradient")).wait()
        return gradient

    def _trainable(self) -> frozenset[str]:
        return frozenset(name for name, p in self._params().items() if p.requires_grad)

    def _lookup(self, constants: Mapping[str, torch.Tensor], source: Source) -> torch.Tensor:
        """The part of a stored tensor that a layer needs."""
        state = self._shardwise
        if source.kind == "constant":
            tensor = constants[source.name]
            held = Box.whole(tuple(tensor.shape))
        else:
            if state.late.entries and source.name in state.late.names and state.settle:
                state.settle(frozenset([source.name]))  # its last update was put off until now
            path, _, leaf = source.name.rpartition(".")
            tensor = getattr(state.modules[path], leaf)
            layout = state.layouts.get(source.name)
            held = Box.whole(tuple(tensor.shape)) if layout is None else layout[state.comm.rank]
        if tensor.ndim == 0 or held == source.box:
            return tensor
        if not held.contains(source.box):
            raise PlanError(
                f"rank {state.comm.rank} holds {held} of {source.name!r} and needs {source.box}"
            )
        return tensor[source.box.slices_in(held)]

    def _count_batches(self, graph: LayerGraph) -> None:
        """Batch norm counts the batches it has seen, on ranks without any of its samples too."""
        for layer in graph.layers:
            if layer.op == "batch_norm":
                module = self._shardwise.modules[layer.attrs["module"]]
                counter = getattr(module, "num_batches_tracked", None)
                if counter is not None and module.training:
                    counter.add_(1)

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Notes what every rank does within, optimizer steps included; all ranks take part.

        >>> with model.record() as trace:
        ...     loss_fn(model(x), y).backward()
        ...     optimizer.step()
        >>> trace.overlap, trace.exposed
        """
        comm, trace = self._shardwise.comm, Trace(self._shardwise.comm.size)
        comm.gather_objects(None)  # all begin at the same time, which is zero on every rank
        comm.timeline.begin()
        hooks = [
            register_optimizer_step_pre_hook(
                lambda *_: (comm.timeline.switch("optimizer", "update"), None)[1]
            ),
            register_optimizer_step_post_hook(lambda *_: (comm.timeline.switch(), None)[1]),
        ]
        try:
            yield trace
        finally:
            for hook in hooks:
                hook.remove()
            events = comm.timeline.end()
        trace.spans += Trace.of_ranks(comm.gather_objects([tuple(e) for e in events])).spans


_unfinished: WeakSet[ParallelModel] = WeakSet()  # models whose sums may still be under way


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Every optimizer waits for the sums of its own parameters."""
    if _unfinished:
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for model in list(_unfinished):
            model._wait_for_sums(own)


register_optimizer_step_pre_hook(_before_step)


class _Run(torch.autograd.Function):
    """One pass through the parallel model, as a single node of the user's autograd graph."""

    @staticmethod
    def forward(ctx, model, runtime, anchor, *inputs):  # type: ignore[no-untyped-def]
        ctx.model, ctx.runtime = model, runtime
        return model._forward(runtime, inputs, record=True)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return None, None, None, *ctx.model._backward(ctx.runtime, gradients)


def _formatted_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    same_rank = x.ndim == y.ndim
    return y.contiguous(memory_format=memory_format_of(x)) if same_rank else y.contiguous()
