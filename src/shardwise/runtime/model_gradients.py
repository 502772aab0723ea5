"""The gradients of a parallel model's parameters: their buffers, and the sums that go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from shardwise.comm import Communicator
from shardwise.plans.gradient_schedule import Engine
from shardwise.runtime.bound import Bound
from shardwise.runtime.gradient_sums import (
    Buffers,
    Chunks,
    DelayedGradients,
    EngineChoice,
    GradientSums,
    Tensors,
)


class ModelGradients:
    """What becomes of gradients from one backward pass to the next."""

    def __init__(
        self,
        engines: list[Engine],
        comm: Communicator,
        lane: Communicator,
        params: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """Sums are made in the `lane`; `params` gives the parameters as they are."""
        self.engines, self._lane, self._params = engines, lane, params
        self.choice = EngineChoice(engines, comm)
        self.holds = False  # sums of gradients are left for later: no_sync()
        self.unfinished: GradientSums | None = None  # sums that optimizers will wait for
        self.delayed = DelayedGradients()  # which an optimizer that delays updates computes
        self.update_delayed: Callable[[frozenset[str] | None], None] | None = None  # is its own
        self._buffers = Buffers()

    def sums(self, bound: Bound, params: Tensors, held: bool) -> GradientSums:
        """The sums of a backward pass; where they are packed is decided once per program."""
        kinds = tuple((param.dtype, param.device) for param in params.values())
        key = (self.choice.engine, kinds)
        if bound.chunks is None or bound.chunks[0] != key:
            rank = self._lane.rank
            bound.chunks = key, Chunks.of(bound.program, params, self.choice.engine, rank)
        chunks = bound.chunks[1]
        return GradientSums(chunks, self._buffers.take(chunks), params, self._lane, held)

    def begin_backward(self) -> None:
        """What is still under way uses the memory of the sums that are about to be made."""
        self.wait()
        if self.update_delayed is not None and self.choice.engine.wait == "use":
            self.update_delayed(None)

    def wait(self, params: Collection[int] | None = None) -> None:
        """Waits for sums that go on after backward, of parameters with these ids or of all."""
        sums = self.unfinished
        if sums is not None:
            named = self._params().items()
            wanted = None if params is None else {n for n, p in named if id(p) in params}
            sums.wait(wanted)
            sums.check_untouched(wanted)
            if not sums.pending and not sums.handed:
                self.unfinished = None

    def update_used(self, names: tuple[str, ...]) -> None:
        """Makes the updates of these weights that were put off until their next use."""
        for name in names:
            if self.update_delayed is not None and name in self.delayed.names:
                self.update_delayed(frozenset([name]))

    def flush(self) -> None:
        """Computes gradients and makes updates that were put off, see `shardwise.optimizer`."""
        self.wait()
        if self.update_delayed is not None:
            self.update_delayed(None)
