"""Blocks that run again in the backward pass: what is kept of them, and how they run twice.

The second time gives the same numbers, to the last bit, and leaves no trace: nothing is sent, the
same random numbers are drawn and the generators stay where they were, running statistics do not
move on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.plans.program import Run
from shardwise.runtime.lowering import BlockFunction

Total = Callable[[torch.Tensor], torch.Tensor]


class Totals:
    """Sums over ranks inside layers: a block that runs again reads what it summed before."""

    def __init__(self) -> None:
        self._noted: list[torch.Tensor] | None = None
        self._left: Iterator[torch.Tensor] | None = None

    def of(self, total: Total) -> Total:
        """The same sum, with the messages or without."""

        def run(x: torch.Tensor) -> torch.Tensor:
            if self._left is not None:
                return next(self._left)
            y = total(x)
            if self._noted is not None:
                self._noted.append(y)
            return y

        return run

    @contextmanager
    def noted(self) -> Iterator[list[torch.Tensor]]:
        """Within, the sums are noted in a list."""
        self._noted = found = []
        try:
            yield found
        finally:
            self._noted = None

    @contextmanager
    def read(self, noted: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within, the sums are these, in their order."""
        self._left = iter(noted)
        try:
            yield
        finally:
            self._left = None


@dataclass
class FirstRun:
    """What a block met in the forward pass, and is to meet again."""

    block: Run
    function: BlockFunction
    totals: Totals
    device: torch.device | None
    _sums: list[torch.Tensor] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)  # of its weights
    _states: dict[int, torch.Tensor] = field(default_factory=dict)  # those it may write into
    _random: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    _settings: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    @contextmanager
    def noted(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within, it runs for the first time, on these weights."""
        if any(op.strategy.draws or op.local.layer.traits.draws for op in self.block.ops):
            self._random = [(each, each.get_state()) for each in _generators(self.device)]
        modules = {id(s.module): s.module for s in self.function.stages if s.module is not None}
        self._settings = [(module, _settings(module)) for module in modules.values()]
        self._states = {place: weights[place].clone() for place in self._state_places()}
        with self.totals.noted() as self._sums:
            yield
        self._versions = list(map(_version, weights))  # an update may have waited for this run

    def _state_places(self) -> list[int]:
        """Where running statistics are among the weights.

        torch does not count what its norms write into them, so that versions do not tell.
        """
        own = (op for op in self.block.ops if op.strategy.counts_batches or not op.strategy.known)
        names = {source.name for op in own for source in op.operands if source.kind == "buffer"}
        return [i for i, weight in enumerate(self.function.stored) if weight.name in names]

    @contextmanager
    def again(self, weights: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Within, it runs on what is given as on these weights for the first time."""
        for place, (weight, version) in enumerate(zip(weights, self._versions, strict=True)):
            if place not in self._states and _version(weight) != version:
                raise changed(self.function.stored[place].name)
        given = [self._states[i].clone() if i in self._states else w for i, w in enumerate(weights)]
        now = [(generator, generator.get_state()) for generator, _ in self._random]
        modes = [(module, _settings(module)) for module, _ in self._settings]
        _restore(self._random, self._settings)
        try:
            with self.totals.read(self._sums):
                yield given
        finally:
            _restore(now, modes)


@dataclass
class Kept:
    """What is kept of a segment until the backward pass."""

    received: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # of moved values
    runs: dict[int, FirstRun] = field(default_factory=dict)  # by the id of the block
    _values: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def keep(self, name: str, value: torch.Tensor) -> None:
        self._values[name] = value, _version(value)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The values from elsewhere, as they were."""
        for name, (value, version) in self._values.items():
            if _version(value) != version:
                raise changed(name)
        return {name: value for name, (value, _) in self._values.items()}


def changed(name: str) -> ShardwiseError:
    return ShardwiseError(
        f"{name!r} was changed in place between the forward pass and the backward pass, which "
        "computes layers again that read it; change it after the backward pass"
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _generators(device: torch.device | None) -> list[torch.Generator]:
    """Where random numbers come from that layers draw on a device."""
    found = [torch.default_generator]
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def _settings(module: Any) -> dict[str, Any]:
    """The mode of a module and its numbers (the p of dropout), which a user may set meanwhile."""
    return {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float))}


def _restore(random: Sequence[tuple[Any, Any]], settings: Sequence[tuple[Any, Any]]) -> None:
    for generator, state in random:
        generator.set_state(state)
    for module, values in settings:
        vars(module).update(values)
