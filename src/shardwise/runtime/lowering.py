"""A block of layers as a function of tensors: (inputs, weights) -> outputs.

What can be known before a block runs is found out once: where every operand stands, which casts are
made, what a rank without a part of a layer makes instead. What then runs is given its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import getitem
from typing import Any

import torch

from shardwise.errors import PlanError, ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Slices
from shardwise.operators import Local
from shardwise.operators.strategy import Function
from shardwise.plans.program import Op, OperandSource, Run
from shardwise.runtime.block import Block, plain
from shardwise.tensors import autocast_to


@dataclass(frozen=True)
class Types:
    """The types and the device of values between layers.

    What is computed in 16 bits torch.autocast decides, when the model is captured under it
    (`Captured` in model/torch_export.py).
    """

    dtypes: Mapping[str, torch.dtype]
    autocast: torch.dtype | None  # what torch.autocast lowers to, if layers run under it
    device: torch.device | None


@dataclass(frozen=True)
class Weight:
    """A parameter, buffer or constant, and the part of it that a block is given."""

    name: str
    owner: Any  # the module that has it, or nothing: a constant
    held: tuple[int, ...]  # the shape of this rank's block
    part: Slices | None  # of this block, where a layer needs less
    constant: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        source: OperandSource,
        modules: Mapping[str, Any],
        constants: Mapping[str, torch.Tensor],
        layouts: Mapping[str, Layout],
        rank: int,
    ) -> Weight:
        path, _, leaf = source.name.rpartition(".")
        constant = constants[source.name] if source.kind == "constant" else None
        owner = None if constant is not None else modules[path]
        tensor = getattr(owner, leaf) if constant is None else constant
        layout = layouts.get(source.name) if constant is None else None
        held = Box.whole(tuple(tensor.shape)) if layout is None else layout[rank]
        shape = tuple(tensor.shape) if held.empty or not tensor.ndim else held.shape
        if tensor.ndim == 0 or held == source.box:
            return cls(source.name, owner, shape, None, constant)
        if not held.contains(source.box):
            raise PlanError(f"rank {rank} holds {held} of {source.name!r} and needs {source.box}")
        return cls(source.name, owner, shape, source.box.slices_in(held), constant)

    @cached_property
    def _stored(self) -> Callable[[], torch.Tensor]:
        """Where it lies, unless it is among the leaves that a pass is given."""
        leaf, constant = self.name.rpartition(".")[2], self.constant
        if constant is not None:
            return lambda: constant
        table = self.owner._buffers
        return (
            partial(getitem, table, leaf) if leaf in table else partial(getattr, self.owner, leaf)
        )

    def now(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor as it is; parameters are given as layers are to see them (`leaves`)."""
        tensor = leaves.get(self.name)
        if tensor is None:
            tensor = self._stored()
            tensor = plain(tensor) if isinstance(tensor, Block) else tensor
        if tensor.shape != self.held:
            raise ShardwiseError(
                f"{self.name!r} is {'x'.join(map(str, tensor.shape))}, and was "
                f"{'x'.join(map(str, self.held))} before; make the model parallel again"
            )
        return tensor if self.part is None else tensor[self.part]


@dataclass(frozen=True)
class Stage:
    """One layer of a block: what it computes of the values at some places."""

    name: str
    run: Function
    operands: tuple[int, ...]
    stored: tuple[str, ...]  # the parameters and buffers among them
    done: tuple[int, ...]  # places that no later stage reads
    pure: bool  # nothing but a function of its operands: no messages, no draws, no state
    module: Any  # that the layer belongs to, whose mode it follows


@dataclass(frozen=True)
class BlockFunction:
    """(inputs, weights) -> outputs. Every stage puts its result behind all values before it."""

    stored: tuple[Weight, ...]  # what its weights are
    stages: tuple[Stage, ...]
    outputs: tuple[int, ...]
    failed: Callable[[str], object]  # is told the layer
    num_given: int  # inputs and weights, behind which the results of stages come

    def __call__(
        self, inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        values: list[Any] = [*inputs, *weights]
        for stage in self.stages:
            try:
                values.append(stage.run([values[place] for place in stage.operands]))
            except BaseException:
                self.failed(stage.name)
                raise
            for place in stage.done:
                values[place] = None
        return [values[place] for place in self.outputs]

    def weights(self, leaves: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Its weights as they are now; parameters are given as layers are to see them."""
        return [weight.now(leaves) for weight in self.stored]

    def wrapped(self, wrap: Callable[[Stage], Function]) -> BlockFunction:
        """The same, with something done before or after every stage."""
        return replace(self, stages=tuple(replace(s, run=wrap(s)) for s in self.stages))


def lower(
    run: Run,
    types: Types,
    share: Callable[[Op], Local],
    stored: Callable[[OperandSource], Weight],
    failed: Callable[[str], object],
) -> BlockFunction:
    """The function that a block of this rank's program is."""
    sources = [s for op in run.ops for s in op.operands if s.kind != "value"]
    distinct = list(dict.fromkeys(sources))
    places: dict[Any, int] = {name: place for place, name in enumerate(run.inputs)}
    places |= {source: len(run.inputs) + i for i, source in enumerate(distinct)}
    operands: list[tuple[int, ...]] = []
    for op in run.ops:
        operands.append(tuple(places[s.name if s.kind == "value" else s] for s in op.operands))
        places[op.result] = len(run.inputs) + len(distinct) + len(operands) - 1
    outputs = tuple(places[name] for name in run.outputs)
    done, shares = _last_uses(operands, kept=outputs), [share(op) for op in run.ops]
    stages = tuple(
        Stage(
            op.local.layer.name,
            _function(op, types, shares[index]),
            operands[index],
            tuple(s.name for s in op.operands if s.kind in ("param", "buffer")),
            done[index],
            _is_pure(op, shares[index]),
            shares[index].module,
        )
        for index, op in enumerate(run.ops)
    )
    num_given = len(run.inputs) + len(distinct)
    return BlockFunction(tuple(map(stored, distinct)), stages, outputs, failed, num_given)


def _is_pure(op: Op, local: Local) -> bool:
    layer = local.layer
    talks = op.sums is not None or bool(op.gathers)
    draws = op.strategy.draws or layer.traits.draws
    others = layer.target and not layer.target.startswith("aten.")  # with a backward of its own
    counts = op.strategy.counts_batches and getattr(local.module, "momentum", 0.0) is None
    return not (talks or draws or others or counts or layer.traits.autocast)


def _last_uses(operands: Sequence[tuple[int, ...]], kept: Iterable[int]) -> list[tuple[int, ...]]:
    """For every stage the places that are read there for the last time."""
    seen, found = set(kept), []
    for places in reversed(operands):
        found.append(tuple(sorted(set(places) - seen)))
        seen.update(places)
    return found[::-1]


def _function(op: Op, types: Types, local: Local) -> Function:
    """What a layer computes on this rank, with the types that values are to have."""
    if not op.active:
        values = tuple(i for i, source in enumerate(op.operands) if source.kind == "value")
        return partial(_nothing, values, op.local.output.shape, types.dtypes[op.result], types)
    layer, compute = op.local.layer, op.strategy.lower(local)
    shape, dtype, region = op.local.output.shape, types.dtypes[op.result], layer.traits.autocast
    lowers = types.autocast is not None or region is not None
    if op.strategy.contracts and lowers:
        compute = partial(_of_one_type, compute, dtype)
    if region is not None:
        compute = partial(_within, region, compute)
    if op.without:
        without = tuple((index, layer.operands[index].shape) for index in op.without)
        compute = partial(_shaped, compute, without)

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        y = compute(tensors)
        return y if y.dtype is dtype and y.shape == shape else fitted(y)

    def fitted(y: torch.Tensor) -> torch.Tensor:
        y = y if y.ndim else y.reshape(1)
        if lowers and y.is_floating_point():
            y = y.to(dtype)
        if y.shape != shape or y.dtype != dtype:
            raise ShardwiseError(
                f"layer {layer.name!r} ({layer.op}) made {_kind(y.shape, y.dtype)} where "
                f"{_kind(shape, dtype)} was expected; the model was captured for inputs or "
                "parameters of other types"
            )
        return y

    return run


def _within(
    region: tuple[str, torch.dtype | None], compute: Function, tensors: list[torch.Tensor]
) -> torch.Tensor:
    """Under a torch.autocast of the model's own."""
    with autocast_to(*region):
        return compute(tensors)


def _of_one_type(
    compute: Function, dtype: torch.dtype, tensors: list[torch.Tensor]
) -> torch.Tensor:
    """A product's operands have its type: autocast does not know every way to compute one."""
    return compute([t if t.dtype is dtype else t.to(dtype) for t in tensors])


def _shaped(
    compute: Function, without: tuple[tuple[int, tuple[int, ...]], ...], tensors: list[torch.Tensor]
) -> torch.Tensor:
    """Boxes of nothing have no shape: operands without elements get theirs."""
    for index, whole in without:
        if not tensors[index].numel():
            tensors[index] = tensors[index].reshape(whole)
    return compute(tensors)


def _nothing(
    values: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    types: Types,
    tensors: list[torch.Tensor],
) -> torch.Tensor:
    """The result of a layer of which this rank has no part.

    It is made of the operands: a norm before this layer still sums its statistics in backward, on
    ranks without samples too.
    """
    operands = [tensors[index] for index in values] or tensors
    parts = [t.reshape(-1)[:0].to(dtype) for t in operands if t.requires_grad]
    if not parts or not (dtype.is_floating_point or dtype.is_complex):
        return torch.empty(shape, dtype=dtype, device=types.device)
    return torch.cat(parts).reshape(shape)


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
