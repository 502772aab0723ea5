"""What can be done with a parallel model beyond what it could do before: `shardwise.of(model)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.comm import Communicator
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.torch_export import as_sizes, shapes_of
from shardwise.modules import named_tensors
from shardwise.plans.plan import Plan
from shardwise.plans.program import layer_layout
from shardwise.plans.trace import Trace
from shardwise.runtime.agreement import agree_on, together
from shardwise.runtime.backward_pass import check_summed
from shardwise.runtime.block import BlockParameter, as_block, exact, plain
from shardwise.runtime.rank_machine import Tensors
from shardwise.runtime.state import State
from shardwise.runtime.weights import gather_whole

Batch = int | Sequence[Any]  # samples, or the shape of the whole input, or of all of them


class Handle:
    """The plan of a parallel model, its blocks, and what all ranks do together with it.

    Its members are also the model's own, except where the model has something of that name.
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        self._model, self._state = model, state

    @property
    def plan(self) -> Plan:
        """How every layer is split."""
        return self._state.plan

    @property
    def comm(self) -> Communicator:
        """How this rank talks to the others."""
        return self._state.comm

    # -- passes --------------------------------------------------------------------------------

    def forward(self, *inputs: torch.Tensor, batch: Batch | None = None) -> Any:
        """The output for the global batch, which every rank is given whole.

        Or, with `batch=` so many samples, for parts of it: each rank gives its own (`input_box`).
        Where images are of another size than the plan's, `batch` is the shape of the whole input.
        """
        return self._model(*inputs, _shardwise_batch=batch)

    def input_box(self, batch: Batch, index: int = 0) -> Box:
        """The part of a global batch that this rank reads when it is given parts.

        `batch` is a number of samples, or the shape of the whole input, or of all of them.
        """
        graph = self._graph(self.plan.training, batch)  # inputs are the same in both modes
        return layer_layout(graph, self.plan, graph.inputs[index])[self.comm.rank]

    def output_box(self, batch: Batch, index: int = 0) -> Box:
        """The part of an output that this rank returns with output="local"."""
        graph = self._graph(self._model.training, batch)
        return layer_layout(graph, self.plan, graph.outputs[index])[self.comm.rank]

    def _graph(self, training: bool, batch: Batch) -> LayerGraph:
        return self._state.programs.graph(training, as_sizes(batch, len(self.plan.inputs)))

    def first_not_finite(self, *inputs: torch.Tensor, batch: Batch | None = None) -> str | None:
        """The first layer whose output is not finite for this batch; all ranks must call it."""
        state, found = self._state, set()

        def watch(layer: str, y: torch.Tensor) -> None:
            if y.is_floating_point() and not bool(y.isfinite().all()):
                found.add(layer)

        state.watch = watch
        try:
            with torch.no_grad():
                self.forward(*inputs, batch=batch)
        finally:
            state.watch = None
        anywhere = set().union(*state.comm.gather_objects(found))
        graph = self._graph(state.training, shapes_of(inputs) if batch is None else batch)
        return next((layer.name for layer in graph.layers if layer.name in anywhere), None)

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Notes what every rank does within, optimizer steps included; all ranks take part.

        >>> with model.record() as trace:
        ...     loss_fn(model(x), y).backward()
        ...     optimizer.step()
        >>> trace.overlap, trace.exposed
        """
        comm, trace = self.comm, Trace(self.comm.size)
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up within on each rank; the next backward pass outside sums them all.

        Both passes, forward and backward, must be within. Until the sum is made, whoever reads a
        gradient is told so: clipping, an optimizer's step. Where parameters have hooks, which are
        for whole gradients, every pass makes its sums all the same.

        >>> with model.no_sync():
        ...     loss_fn(model(x1), y1).backward()
        >>> loss_fn(model(x2), y2).backward()
        """
        gradients = self._state.gradients
        before, gradients.holds = gradients.holds, True
        try:
            yield
        finally:
            gradients.holds = before

    # -- tensors -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Computes gradients and makes updates that were put off, see `shardwise.optimizer`."""
        with together(self.comm, "flush"):
            self._state.gradients.flush()

    def check_values(self) -> None:
        """Raises on all ranks where a tensor was made on the meta device and nothing was loaded."""
        with together(self.comm, "check_values"):
            self._state.blocks.check_values()

    def layout(self, name: str) -> Layout | None:
        """Where the blocks of a parameter or buffer lie; None where every rank has all of it."""
        return self._state.blocks.layouts.get(name)

    def blocks(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """This rank's block of every tensor that layers use, and where it lies."""
        self.flush()
        self.check_values()
        found = ((name, self.layout(name), tensor) for name, tensor in named_tensors(self._model))
        return {name: (layout[self.comm.rank], t) for name, layout, t in found if layout}

    def full_tensors(self, ranks: tuple[int, ...] | None = None) -> Tensors:
        """Every whole parameter and buffer by its name; on all ranks, or on those given.

        All ranks must call it; on other ranks than those given, split tensors are empty.
        """
        self.flush()
        self.check_values()
        found, whole = {}, {}
        with together(self.comm, "full_tensors"):
            for name, tensor in named_tensors(self._model):
                if id(tensor) not in whole:
                    whole[id(tensor)] = self._whole(name, name, tensor.detach(), ranks)
                found[name] = whole[id(tensor)]
        return found

    def full_gradients(self, ranks: tuple[int, ...] | None = None) -> Tensors:
        """Every parameter's whole gradient by its name; see `full_tensors`."""
        self.flush()
        self._check_summed()
        named, found = dict(self._model.named_parameters()), {}
        with together(self.comm, "full_gradients"):
            here = {name for name, param in named.items() if param.grad is not None}
            anywhere = set().union(*self.comm.gather_objects(here))
            for name in (name for name in named if name in anywhere):
                gradient = named[name].grad
                block = torch.zeros_like(named[name]) if gradient is None else gradient
                found[name] = self._whole(name, f"{name} gradient", block, ranks)
        return found

    def _check_summed(self) -> None:
        """Raises on all ranks where a gradient of one waits for its sum."""
        with together(self.comm, "sums of gradients"):
            check_summed(self._state)

    def _whole(
        self, name: str, what: str, block: torch.Tensor, ranks: tuple[int, ...] | None
    ) -> torch.Tensor:
        layout = self.layout(name)
        if layout is None:
            return block
        return gather_whole(what, block, layout, self.comm, ranks)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scales all gradients as torch's clip_grad_norm_ would on one device.

        All ranks must call it.
        """
        self.flush()
        self._check_summed()
        params = list(self._model.parameters())
        with together(self.comm, "norms"):
            number = sum(param.grad is not None for param in params)
            agree_on(number, "has gradients of other parameters", self.comm)
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)

    @torch.no_grad()
    def norms(
        self, params: Sequence[torch.Tensor], values: Sequence[torch.Tensor], p: float = 2.0
    ) -> torch.Tensor:
        """The norm of each whole value, of which this rank has a block as it has of the parameter.

        All ranks must call it, for the same parameters.
        """
        found = [exact(plain(value)) for value in values]
        for index, param in enumerate(params):
            if isinstance(param, BlockParameter):
                found[index] = as_block(found[index], param._place)
        return torch.stack(torch._foreach_norm(found, p))
