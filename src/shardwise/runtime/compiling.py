"""Blocks compiled by torch.compile.

A block is cut into parts: layers in a row that are nothing but functions of tensors are traced
together, once, and compiled as one; what sends messages, draws random numbers or counts batches
runs between them as it is. A model on one worker is one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.runtime.lowering import BlockFunction, Stage

Tensors = Sequence[torch.Tensor]
GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that use CUDA graphs


def own_memory(tensors: Sequence[Any]) -> list[Any]:
    """Copies: what a CUDA graph makes is overwritten when it runs again."""
    numbers = [t for t in tensors if t is not None and t.is_floating_point()]
    copies = iter(torch._foreach_mul(numbers, 1) if numbers else ())  # a few kernels for all
    return [
        tensor if tensor is None else next(copies) if tensor.is_floating_point() else tensor.clone()
        for tensor in tensors
    ]


@dataclass(frozen=True)
class Part:
    """Stages in a row, and the places of what they read and of what others read of theirs."""

    stages: tuple[tuple[int, Stage], ...]  # with the places of their results
    operands: tuple[int, ...]
    results: tuple[int, ...]
    done: tuple[int, ...]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(self.operands, tensors, strict=True))
        for place, stage in self.stages:
            values[place] = stage.run([values[operand] for operand in stage.operands])
        return [values[place] for place in self.results]


def parts_of(block: BlockFunction) -> list[tuple[bool, Part]]:
    """The parts of a block, and whether each can be compiled."""
    placed = list(enumerate(block.stages, start=block.num_given))
    found = []
    for is_pure, group in groupby(placed, key=lambda each: each[1].pure):
        stages = list(group)
        runs = [stages] if is_pure else [[each] for each in stages]
        found += [(is_pure, _part(run, block)) for run in runs]
    return found


def _part(stages: list[tuple[int, Stage]], block: BlockFunction) -> Part:
    made, last = {place for place, _ in stages}, stages[-1][0]
    read = dict.fromkeys(place for _, stage in stages for place in stage.operands)
    later = block.stages[last + 1 - block.num_given :]
    wanted = {place for stage in later for place in stage.operands} | set(block.outputs)
    done = {place for _, stage in stages for place in stage.done} - made
    operands = tuple(place for place in read if place not in made)
    return Part(tuple(stages), operands, tuple(sorted(made & wanted)), tuple(sorted(done)))


@dataclass
class CompiledPart:
    """A part as torch.compile makes it, for every way in which its operands may lie in memory."""

    part: Part
    stored: range  # the places of weights: they stay where they are in memory
    mode: str
    _modules: list[Any] = field(init=False)
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modules = (stage.module for _, stage in self.part.stages)
        self._modules = [module for module in modules if module is not None]

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        modes = [module.training for module in self._modules]
        key = torch.is_grad_enabled(), *modes, *[tensor.stride() for tensor in tensors]
        if key not in self._compiled:
            self._compiled[key] = self._compile(tensors)
        return self._compiled[key](*tensors)

    def _compile(self, tensors: Tensors) -> Callable[..., Any]:
        for place, tensor in zip(self.part.operands, tensors, strict=True):
            if place in self.stored:
                torch._dynamo.mark_static_address(tensor, guard=False)
        trace = make_fx(
            self.part, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True
        )
        return torch.compile(trace(*tensors), mode=self.mode, dynamic=False, fullgraph=True)


class CompiledBlock:
    """A block that computes what its function computes, part by part."""

    def __init__(self, function: BlockFunction, mode: str) -> None:
        self.function = function
        stored = range(function.num_given - len(function.stored), function.num_given)
        self.parts = [
            (CompiledPart(part, stored, mode) if is_pure else part, part)
            for is_pure, part in parts_of(function)
        ]

    def weights(self, leaves: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return self.function.weights(leaves)

    def __call__(
        self, inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        values: list[Any] = [*inputs, *weights, *[None] * len(self.function.stages)]
        for run, part in self.parts:
            try:
                found = run(*[values[place] for place in part.operands])
            except BaseException:
                self.function.failed(part.stages[0][1].name)
                raise
            for place, y in zip(part.results, found, strict=True):
                values[place] = y
            for place in part.done:
                values[place] = None
        return [values[place] for place in self.function.outputs]
