"""Operators that put stretches of their operands one after the other, along one dimension.

A stretch is a range of an operand, perhaps strided, mirrored or one row repeated; an operand that
is needed twice is given twice. So tensors are joined, cut, mirrored, shifted and written into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import torch

from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators.along import along
from shardwise.operators.calls import PREVIOUS, Call, Request, Requests
from shardwise.operators.reduce import DimAttrs
from shardwise.operators.shape import Moves
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Function, Local, Need, operator


@dataclass(frozen=True)
class Stretch:
    """So many elements of an operand, from one on; a step of 0 repeats it, -1 goes back.

    Starts below 0 count from its end. Where no size is said, it is what the others leave, or all
    of the operand: what is kept of a call does not depend on the batch size.
    """

    start: int = 0
    size: int | None = None
    step: int = 1


@dataclass(frozen=True)
class JoinAttrs(DimAttrs):
    stretches: tuple[Stretch, ...]  # one of every operand

    def ranges(self, layer: Layer) -> list[tuple[int, int, int]]:
        """The start, the size and the step of every stretch."""
        wholes = [operand.shape[self.dim] for operand in layer.operands]
        sizes = [stretch.size for stretch in self.stretches]
        if sizes.count(None) == 1:
            left = layer.shape[self.dim] - sum(size for size in sizes if size is not None)
            sizes = [left if size is None else size for size in sizes]
        found = zip(self.stretches, sizes, wholes, strict=True)
        return [
            (p.start % whole if whole else 0, whole if size is None else size, p.step)
            for p, size, whole in found
        ]


class Join(Moves):
    """A block needs of every operand what falls into it."""

    def needs(self, split: Split[JoinAttrs]) -> tuple[Need, ...]:
        attrs, found, offset = split.layer.attrs, [], 0
        stretches = attrs.ranges(split.layer)
        for operand, (start, size, step) in zip(split.layer.operands, stretches, strict=True):
            begin, end = np.clip(split.dim_ranges(attrs.dim) - offset, 0, size).T
            ends = start + step * np.stack([begin, end - 1])
            read = np.stack([ends.min(axis=0), ends.max(axis=0) + 1], axis=1)
            read *= ((end > begin) & split.used)[:, None]
            found.append(Need(Layout.of(operand.shape, split.but(attrs.dim, read))))
            offset += size
        return tuple(found)

    def run(self, local: Local[JoinAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.lower(local)(tensors)

    def lower(self, local: Local[JoinAttrs]) -> Function:
        dim, dtype, offset = local.attrs.dim, local.layer.dtype, 0
        start, stop = local.output.starts[dim], local.output.stops[dim]
        held: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = []
        for index, (_, size, step) in enumerate(local.attrs.ranges(local.layer)):
            count = min(stop, offset + size) - max(start, offset)
            if count > 0:
                held.append((index, _taken(step, dim, count)))
            offset += size

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            parts = [take(tensors[index]) for index, take in held]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            if joined.dtype is dtype:
                return joined
            return joined.to(reduce(torch.promote_types, [t.dtype for t in tensors]))  # all of them

        return run


def _taken(step: int, dim: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is made of the part of an operand that a stretch of so many elements needs."""
    if step == 1:
        return lambda x: x
    if step == 0:
        return lambda x: x.expand(*x.shape[:dim], count, *x.shape[dim + 1 :])
    strided = (slice(None),) * dim + (slice(None, None, abs(step)),)
    return (lambda x: x[strided]) if step > 0 else (lambda x: x.flip(dim)[strided])


Parts = Sequence[tuple[Any, Stretch]]  # tensors, and what is taken of them


def joined(op: str, dim: int, parts: Parts, shape: tuple[int, ...] | None = None) -> Request:
    """The layer that puts these stretches together; those of nothing are left out."""
    filled = [part for part in parts if part[1].size is None or part[1].size > 0]
    attrs = JoinAttrs(dim, tuple(stretch for _, stretch in filled))
    return Request(op, tuple(tensor for tensor, _ in filled), attrs, shape)


@operator("cat", "cat", "concat", "concatenate")
class Cat(Join):
    """Concatenation."""

    def read(self, call: Call) -> Request | None:
        tensors = tuple(call["tensors"])
        ranks = {len(call.shape(tensor)) for tensor in tensors}
        if len(ranks) > 1:  # legacy empty tensors
            return None
        return joined("cat", call["dim"] % ranks.pop(), [(tensor, Stretch()) for tensor in tensors])


CHUNKS = ("chunk", "split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
UNSAFE = ("unsafe_split_with_sizes",)


@operator("slice", "slice", "narrow", "select", "unbind", *CHUNKS, *UNSAFE)
class Slice(Join):
    """A strided part of one dimension."""

    free = True

    def read(self, call: Call) -> Request | Requests:
        shape = call.shape()
        dim, step = call["dim"] % len(shape), 1
        if call.name in ("select", "unbind"):  # a slice, then a view without that dimension
            index = (call["index"] if call.name == "select" else call.item) % shape[dim]
            cut = (*shape[:dim], 1, *shape[dim + 1 :])
            part = joined("slice", dim, [(call.x, Stretch(index))], cut)
            return [part, Request("view", (PREVIOUS,))]
        if call.name == "slice":
            start, _, step = slice(*call.pick("start", "end", "step")).indices(shape[dim])
            if step == 1 and call.result == shape:  # torch.export leaves some of these out, too
                return []
        elif call.name == "narrow":
            start = call["start"] % shape[dim]
        else:
            parts = call.node.meta["val"][: call.item]
            start = sum(call.model.shape_of(part)[dim] for part in parts)
        return joined("slice", dim, [(call.x, Stretch(start, step=step))])


@operator("rearrange", "flip", "roll", "slice_scatter", "select_scatter")
class Rearrange(Join):
    """Mirrored, shifted around, or written into."""

    def read(self, call: Call) -> Request | Requests | None:
        return getattr(self, f"_{call.name}")(call)

    @staticmethod
    def _flip(call: Call) -> Requests:
        found: Requests = []
        for dim in sorted({dim % len(call.shape()) for dim in call["dims"]}):
            x = PREVIOUS if found else call.x
            found.append(joined("rearrange", dim, [(x, Stretch(-1, step=-1))]))
        return found

    @staticmethod
    def _roll(call: Call) -> Requests:
        shape, found = call.shape(), []
        if not call["dims"]:  # of all elements, one after the other
            flat = Request("view", (call.x,), shape=(prod(shape),))
            around = _around(0, PREVIOUS, prod(shape), call["shifts"][0])
            return [flat, replace(around, shape=flat.shape), Request("view", (PREVIOUS,))]
        for dim, by in zip(call["dims"], call["shifts"], strict=True):
            x = PREVIOUS if found else call.x
            found.append(_around(dim % len(shape), x, shape[dim], by))
        return found

    @staticmethod
    def _slice_scatter(call: Call) -> Request | None:
        x, written = call.pick("self", "src")
        size, dim = call.shape(x), call["dim"] % len(call.shape(x))
        start, stop, step = slice(*call.pick("start", "end", "step")).indices(size[dim])
        if step != 1:
            return along(call, (dim,), written)
        return _written(dim, x, size[dim], written, start, max(stop - start, 0))

    @staticmethod
    def _select_scatter(call: Call) -> Requests:
        x, written = call.pick("self", "src")
        shape, dim = call.shape(x), call["dim"] % len(call.shape(x))
        row = (*shape[:dim], 1, *shape[dim + 1 :])
        index = call["index"] % shape[dim]
        return [
            Request("view", (written,), shape=row, dtype=written.meta["val"].dtype),
            _written(dim, x, shape[dim], PREVIOUS, index, 1),
        ]


def _around(dim: int, x: Any, size: int, by: int) -> Request:
    """Shifted by so many: what leaves at one end comes in at the other."""
    by = by if abs(by) < size else by % max(size, 1)
    stretches = (Stretch(-by, by), Stretch()) if by > 0 else (Stretch(-by), Stretch(0, -by))
    return joined("rearrange", dim, [(x, stretch) for stretch in stretches])


def _written(dim: int, x: Any, size: int, written: Any, start: int, count: int) -> Request:
    """What stands in x before, what is written into it, and what stands behind."""
    end = start + count
    before, behind = Stretch(0, start), Stretch(end, size - end)
    return joined("rearrange", dim, [(x, before), (written, Stretch(0, count)), (x, behind)])
