"""The interpreter: runs a program forward and backward on this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.comm import About, Communicator
from shardwise.comm.exchange import Wait, carry, start
from shardwise.comm.timeline import Timeline
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.transfer import Transfer
from shardwise.graph.layer_graph import LayerGraph
from shardwise.operators import Gradients, Local
from shardwise.plans.program import Cut, Move, Op, Program, Run, Source, Step
from shardwise.runtime.gradient_sums import Chunks, GradientSums
from shardwise.tensors import filling

Tensors = dict[str, torch.Tensor]
Lookup = Callable[[Source], torch.Tensor]  # the stored block of a parameter or buffer
Watch = Callable[[str, torch.Tensor], None]  # a layer's name and its output


@dataclass
class Tape:
    """What a block leaves for its backward pass: its inputs, and where its outputs came from."""

    leaves: Tensors
    edges: dict[str, GradientEdge]


@dataclass(eq=False)
class Bound:
    """A program whose layers know their messages and modules: made once, for all its passes.

    It outlives every pass, so nothing here may refer to one.
    """

    program: Program
    graph: LayerGraph
    comm: Communicator
    modules: Mapping[str, Any]
    chunks: tuple[Any, Chunks] | None = None  # how gradients were packed last, and for what
    # Gradients of some parameters that are computed when they are due: names, and how.
    late: list[tuple[list[str], Gradients]] = field(default_factory=list)
    _shares: dict[tuple[str, Any], Local] = field(default_factory=dict)

    def share(self, op: Op, device: torch.device | None) -> Local:
        """The op's share, with the communication and the module that it may ask for."""
        key = op.result, device
        if key not in self._shares:
            name, late = op.local.layer.name, self.late
            params = [source.name for source in op.operands if source.kind == "param"]
            self._shares[key] = replace(
                op.local,
                device=device,
                module=self.modules.get(op.local.attrs.get("module", None)),
                sum=None if op.sums is None else _sum(op.sums, self.comm, f"{name} statistics"),
                gather=tuple(_gather(each, self.comm, f"{name} gathered") for each in op.gathers),
                later=lambda gradients: late.append((params, gradients)),
            )
        return self._shares[key]


def _gather(transfer: Transfer, comm: Communicator, name: str) -> Callable[[torch.Tensor], Wait]:
    about = About(name, "gradients")
    return lambda x: start(transfer, x, comm, about)


def _sum(
    transfer: Transfer, comm: Communicator, name: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape, about = transfer.source[comm.rank].shape, About(name, "statistics")
    return lambda x: carry(transfer, x.reshape(shape), comm, about).view(x.shape)


@dataclass
class Runtime:
    """One pass through a program, and what it keeps for the way back."""

    bound: Bound
    lookup: Lookup
    precision: torch.dtype | None = None  # of all values between layers, if not the parameters'
    watch: Watch | None = None  # is shown the output of every layer
    device: torch.device | None = None  # of the inputs
    tapes: dict[int, Tape] = field(default_factory=dict)  # by position of the block

    @property
    def program(self) -> Program:
        return self.bound.program

    @property
    def comm(self) -> Communicator:
        return self.bound.comm

    # -- forward -------------------------------------------------------------------------------

    def forward(self, inputs: Tensors, record: bool) -> Tensors:
        """This rank's part of every output."""
        self.device = next(iter(inputs.values())).device
        values: dict[str, Any] = {name: self._lowered(x) for name, x in inputs.items()}
        pending: dict[str, Callable[[], torch.Tensor]] = {}

        def value(name: str) -> torch.Tensor:
            if name in pending:
                values[name] = pending.pop(name)()
            return values[name]

        for index, step in enumerate(self.program.forward):
            if isinstance(step, Run):
                values |= self._run(step, {name: value(name) for name in step.inputs}, record)
            elif isinstance(step, Move):
                pending[step.target] = start(
                    step.transfer, value(step.source), self.comm, About(step.target)
                )
            else:
                values[step.target] = cut(
                    value(step.source), self.program.boxes[step.target], step.need.fill
                )
            for name in self.program.frees[index]:
                values.pop(name, None)
        return {name: value(name) for name in self.program.outputs}

    def _run(self, run: Run, inputs: Tensors, record: bool) -> Tensors:
        if not record or id(run) not in self.program.recorded:
            return {
                name: y for name, y in self._compute(run, inputs).items() if name in run.outputs
            }
        needed = self.program.differentiable
        leaves = {name: _leaf(x, name in needed) for name, x in inputs.items()}
        with torch.enable_grad():
            values = self._compute(run, dict(leaves))
            outputs = {name: values[name] for name in run.outputs}
            edges = {
                name: get_gradient_edge(y if y.grad_fn is not None else y.view_as(y))
                for name, y in outputs.items()
                if y.requires_grad
            }
        self.tapes[id(run)] = Tape(leaves, edges)
        return {name: y.detach() for name, y in outputs.items()}

    def _compute(self, run: Run, values: Tensors) -> Tensors:
        timeline = self.comm.timeline
        for op in run.ops:
            timeline.switch(op.local.layer.name, "forward")
            values[op.result] = y = self._op(op, values)
            if self.watch is not None:
                self.watch(op.local.layer.name, y)
            if timeline.on and y.requires_grad:
                y.register_hook(partial(_turn, timeline, op.local.layer.name))
        timeline.switch()
        return values

    def _op(self, op: Op, values: Tensors) -> torch.Tensor:
        tensors = [
            values[source.name] if source.kind == "value" else self.lookup(source)
            for source in op.operands
        ]
        layer = op.local.layer
        if not op.active:
            return self._nothing(op, tensors)
        for index in op.without:  # boxes of nothing have no shape
            if not tensors[index].numel():
                tensors[index] = tensors[index].reshape(layer.operands[index].shape)
        if self.precision is not None:
            sensitive = op.strategy.is_sensitive(layer)
            dtype = torch.float32 if sensitive else self.precision
            tensors = [_as_real(tensor, dtype) for tensor in tensors]
        y = op.strategy.run(self.bound.share(op, self.device), tensors)
        y = self._lowered(y if y.ndim else y.reshape(1))
        if y.shape != op.local.output.shape or y.dtype != self._dtype(op.result):
            raise ShardwiseError(
                f"layer {layer.name!r} ({layer.op}) made {_kind(y.shape, y.dtype)} where "
                f"{_kind(op.local.output.shape, self._dtype(op.result))} was expected; the model "
                "was captured for inputs or parameters of other types"
            )
        return y

    def _nothing(self, op: Op, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The result of a layer of which this rank has no part.

        It is made of the operands: a norm before this layer still sums its statistics in backward,
        on ranks without samples too.
        """
        dtype, shape = self._dtype(op.result), op.local.output.shape
        operands = [t for s, t in zip(op.operands, tensors, strict=True) if s.kind == "value"]
        parts = [t.reshape(-1)[:0].to(dtype) for t in operands or tensors if t.requires_grad]
        if not parts or not (dtype.is_floating_point or dtype.is_complex):
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.cat(parts).reshape(shape)

    def _dtype(self, value: str) -> torch.dtype:
        """The type of a value, as it is kept between layers."""
        dtype = self.program.dtypes[value]
        return self.precision if self.precision and dtype.is_floating_point else dtype

    def _lowered(self, x: torch.Tensor) -> torch.Tensor:
        """As values between layers are kept."""
        return x if self.precision is None else _as_real(x, self.precision)

    # -- backward ------------------------------------------------------------------------------

    def backward(
        self,
        gradients: Tensors,
        params: Tensors,
        sums: GradientSums,
        reached: Collection[str],
        keep: bool = False,
    ) -> Tensors:
        """From gradients of the outputs to those of the inputs; those of weights go to `sums`.

        Only layers that the loss depends on (`reached`) take part, the same on all ranks. What the
        forward pass left is used up, or kept for another time.
        """
        gradients = {name: self._lowered(gradient) for name, gradient in gradients.items()}
        flow = _Flow(gradients)
        self.bound.late.clear()  # of a pass that failed
        whole: Tensors = {}  # gradients of inputs that every rank has whole
        for position, step in enumerate(self.program.backward):
            if not self._is_reached(step, reached):
                sums.after(position)
            elif isinstance(step, Run):
                self._run_backward(step, flow, sums, params, keep)
                sums.after(position)
                sums.late.entries += self.bound.late
                self.bound.late.clear()
            elif isinstance(step, Move):
                gradient = flow.take(step.target, self._zeros(step.target))
                back = start(
                    step.transfer.transpose, gradient, self.comm, About(f"{step.source} gradient")
                )
                flow.add_later(step.source, back)
            else:
                gradient = flow.take(step.target, self._zeros(step.target))
                self._uncut(step, gradient, whole)
        if not keep:
            self.tapes.clear()
        inputs = {name: flow.take(name, None) for name in self.program.inputs}
        return {name: g for name, g in (inputs | whole).items() if g is not None}

    def _is_reached(self, step: Step, reached: Collection[str]) -> bool:
        if isinstance(step, Run):
            return any(op.local.layer.name in reached for op in step.ops)
        return self.program.origins[step.target] in reached

    def _run_backward(
        self, run: Run, flow: _Flow, sums: GradientSums, params: Tensors, keep: bool
    ) -> None:
        tape = self.tapes[id(run)] if keep else self.tapes.pop(id(run))
        outputs, gradients = [], []
        for name in run.outputs:
            gradient = flow.take(name, None)
            if gradient is not None and name in tape.edges:
                outputs.append(tape.edges[name])
                gradients.append(gradient)
        leaves = {name: x for name, x in tape.leaves.items() if x.requires_grad}
        stored = {name: params[name] for name in run.params}
        if not outputs:
            return
        self.comm.timeline.switch(run.ops[-1].local.layer.name, "backward")
        wanted = [*leaves.values(), *stored.values()]
        found = _differentiated(outputs, wanted, gradients, keep)
        self.comm.timeline.switch("gradients packed", "copy")
        for name, gradient in zip(leaves, found, strict=False):
            if gradient is not None:
                flow.add(name, gradient)
        for name, gradient in zip(stored, found[len(leaves) :], strict=True):
            if gradient is not None:
                sums.add(name, gradient)
        self.comm.timeline.switch()

    def _zeros(self, name: str) -> Callable[[], torch.Tensor]:
        shape, dtype = self.program.boxes[name].shape, self._dtype(name)
        return lambda: torch.zeros(shape, dtype=dtype, device=self.device)

    def _uncut(self, step: Cut, gradient: torch.Tensor, whole: Tensors) -> None:
        """The gradient of a part goes back to its place in the whole input."""
        shape = self.program.layouts[step.source].shape
        full, box = Box.whole(shape), self.program.boxes[step.target]
        if step.source not in whole:
            whole[step.source] = gradient.new_zeros(shape)
        inside = full.intersect(box)
        if not inside.empty:
            whole[step.source][inside.slices_in(full)] += gradient[inside.slices_in(box)]


def _differentiated(outputs: list[Any], wanted: Any, gradients: Any, keep: bool) -> tuple[Any, ...]:
    """Gradients; operators that torch cannot differentiate are refused as it names them."""
    try:
        return torch.autograd.grad(outputs, wanted, gradients, keep, allow_unused=True)
    except RuntimeError as error:
        if "is not implemented" in str(error):
            raise ShardwiseError(f"backward pass: {str(error).splitlines()[0]}") from error
        raise


def _turn(timeline: Timeline, name: str, _: torch.Tensor) -> None:
    """The gradient of a layer's output is there: the next thing is its backward pass."""
    timeline.switch(name, "backward")


class _Flow:
    """Gradients on their way: those that are here and those still under way, by value."""

    def __init__(self, gradients: Tensors) -> None:
        self.here: Tensors = dict(gradients)
        self.coming: dict[str, list[Callable[[], torch.Tensor]]] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        self.here[name] = self.here[name] + gradient if name in self.here else gradient

    def add_later(self, name: str, gradient: Callable[[], torch.Tensor]) -> None:
        self.coming.setdefault(name, []).append(gradient)

    def take(self, name: str, default: Callable[[], torch.Tensor] | None) -> Any:
        for gradient in self.coming.pop(name, []):
            self.add(name, gradient())
        if name in self.here:
            return self.here.pop(name)
        return default() if default is not None else None


def _as_real(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of this dtype, unless it holds whole numbers."""
    return x.to(dtype) if x.is_floating_point() else x


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"


def _leaf(x: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    x = x.detach()
    can_have_one = x.is_floating_point() or x.is_complex()
    return x.requires_grad_() if needs_gradient and can_have_one else x


def cut(x: torch.Tensor, box: Box, fill: float) -> torch.Tensor:
    """A box of a whole tensor, which may reach beyond it; a view where it does not."""
    whole = Box.whole(tuple(x.shape))
    if box.empty:
        return x.new_empty(box.shape)
    inside = whole.intersect(box)
    if inside == box:
        return x if box == whole else x[box.slices_in(whole)]
    y = x.new_full(box.shape, filling(fill, x.dtype))
    if not inside.empty:
        y[inside.slices_in(box)] = x[inside.slices_in(whole)]
    return y
