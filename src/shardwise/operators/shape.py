"""Operators that only move elements: views, permutations, concatenation, slices, padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import torch

from shardwise.errors import CaptureError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import Shape, default_dims, view_dims, view_groups
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import PREVIOUS, Call, Request, Requests, permuted
from shardwise.operators.reduce import DimAttrs
from shardwise.operators.splits import Split, rows, window
from shardwise.operators.strategy import Function, Inputs, Local, Need, Strategy, narrow, operator

Pads = tuple[tuple[int, int], ...]  # before and behind, of every dimension


class Moves(Strategy):
    """Operators that compute nothing."""

    keeps_inputs, draws = False, False

    def flops(self, split: Split) -> np.ndarray:
        return np.zeros(split.world)


SIZES = ("reshape", "view", "_unsafe_view")  # views that are told the sizes of their result


@operator("view", *SIZES, "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
class View(Moves):
    """Any reshape: view, flatten, squeeze, unsqueeze.

    Dimensions fall into groups that hold the same elements before and after. In each group the
    leading dimension is cut to the rows that contain the block, the others are needed whole; the
    block is cut out of these rows after the reshape.
    """

    free = True

    def read(self, call: Call) -> Request:
        x, shape = call.shape(), call.result
        told = call.name in SIZES and (call.args.get("shape") or call.args.get("size"))
        asked = told or shape
        fits = all(want in (-1, size) for want, size in zip(asked, shape, strict=False))
        if prod(x) != prod(shape) or not fits:  # sizes that were captured for other batches
            module = call.model.module_of(call.node)
            raise CaptureError(
                f"{repr(module) if module else 'the model'} calls {call.name} with a shape that "
                f"does not fit a batch of {call.model.batch}: {'x'.join(map(str, x))} as "
                f"{'x'.join(map(str, asked))}"
            )
        return Request("view", (call.x,))

    def labels(self, attrs: None, shape: Shape, inputs: Inputs) -> str:
        return view_dims(inputs[0], shape) if inputs else default_dims(shape)

    def needs(self, split: Split) -> tuple[Need, ...]:
        source, target = split.layer.operands[0].shape, split.layer.shape
        if 0 in source:
            return (Need(Layout.on(source, split.world, ())),)
        ranges: list[Ranges] = [split.whole(size) for size in source]
        for ins, outs in view_groups(source, target):
            in_lead, row_in = _rows(ins, source)
            out_lead, row_out = _rows(outs, target)
            if in_lead is None or out_lead is None:
                continue
            ranges[in_lead] = rows(split.dim_ranges(out_lead) * row_out, row_in)
        layout = Layout.of(source, ranges)
        empty = self.output(split).numels == 0  # also where the empty dimension is not the lead
        if empty.any():
            layout = Layout.of(source, [r * ~empty[:, None] for r in ranges])
        return (Need(layout),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.lower(local)(tensors)

    def lower(self, local: Local) -> Function:
        """Rows are flattened group by group, cut to whole output rows, and reshaped."""
        source, target = local.layer.operands[0].shape, local.layer.shape
        held, out = local.needs[0], local.output
        flat_sizes, flat_cuts, made = [], [], list(target)
        for ins, outs in view_groups(source, target):
            size = prod(held.shape[d] for d in ins)
            flat_sizes.append(size)
            in_lead, row_in = _rows(ins, source)
            out_lead, row_out = _rows(outs, target)
            if in_lead is None or out_lead is None:
                flat_cuts.append(slice(None))
                continue
            start = out.starts[out_lead] * row_out - held.starts[in_lead] * row_in
            made[out_lead] = out.shape[out_lead]
            flat_cuts.append(slice(start, start + made[out_lead] * row_out))
        sizes = zip(flat_cuts, flat_sizes, strict=True)
        whole = all(len(range(*cut.indices(size))) == size for cut, size in sizes)
        lead_box = Box(
            tuple(out.starts[d] if made[d] != target[d] else 0 for d in range(len(target))),
            tuple(out.stops[d] if made[d] != target[d] else target[d] for d in range(len(target))),
        )
        crop = None if lead_box == out else out.slices_in(lead_box)

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            x = tensors[0] if whole else tensors[0].reshape(flat_sizes)[tuple(flat_cuts)]
            y = x.reshape(made)
            return y if crop is None else y[crop]

        return run


def _rows(dims: list[int], shape: Shape) -> tuple[int | None, int]:
    """The first dimension of a group that is longer than one, and the elements of a row of it."""
    lead = next((d for d in dims if shape[d] > 1), None)
    return lead, 1 if lead is None else prod(shape[d] for d in dims) // shape[lead]


@dataclass(frozen=True)
class PermuteAttrs:
    order: tuple[int, ...]


@operator("permute", "permute", "transpose", "t")
class Permute(Moves):
    def read(self, call: Call) -> Request:
        order = permuted(call.name, call.args, len(call.shape()))
        return Request("permute", (call.x,), PermuteAttrs(order or (0,)))

    def labels(self, attrs: PermuteAttrs, shape: Shape, inputs: Inputs) -> str:
        return "".join(inputs[0][1][d] for d in attrs.order) if inputs else default_dims(shape)

    def needs(self, split: Split[PermuteAttrs]) -> tuple[Need, ...]:
        order = split.layer.attrs.order
        ranges = [split.dim_ranges(order.index(dim)) for dim in range(len(order))]
        return (Need(Layout.of(split.layer.operands[0].shape, ranges)),)

    def run(self, local: Local[PermuteAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].permute(local.attrs.order)


@operator("cat", "cat")
class Cat(Moves):
    """Concatenation: a block needs the part of each operand that falls into it."""

    def read(self, call: Call) -> Request | None:
        tensors = tuple(call["tensors"])
        ranks = {len(call.shape(tensor)) for tensor in tensors}
        if len(ranks) > 1:  # legacy empty tensors
            return None
        return Request("cat", tensors, DimAttrs(call["dim"] % ranks.pop()))

    def needs(self, split: Split[DimAttrs]) -> tuple[Need, ...]:
        dim, needs, offset = split.layer.attrs.dim, [], 0
        for operand in split.layer.operands:
            size = operand.shape[dim]
            part = np.clip(split.dim_ranges(dim) - offset, 0, size) * split.used[:, None]
            needs.append(Need(Layout.of(operand.shape, split.but(dim, part))))
            offset += size
        return tuple(needs)

    def run(self, local: Local[DimAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.lower(local)(tensors)

    def lower(self, local: Local[DimAttrs]) -> Function:
        held = [index for index, box in enumerate(local.needs) if not box.empty]
        dim, dtype = local.attrs.dim, local.layer.dtype

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            parts = [tensors[index] for index in held]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            if joined.dtype is dtype:
                return joined
            return joined.to(reduce(torch.promote_types, [t.dtype for t in tensors]))  # all of them

        return run


CHUNKS = ("chunk", "split", "split_with_sizes")


@dataclass(frozen=True)
class SliceAttrs(DimAttrs):
    start: int
    step: int = 1


@operator("slice", "slice", "narrow", "select", "unbind", *CHUNKS)
class Slice(Moves):
    """A strided part of one dimension."""

    free = True

    def read(self, call: Call) -> Request | Requests:
        shape = call.shape()
        dim, step = call["dim"] % len(shape), 1
        if call.name == "slice":
            start, _, step = slice(*call.pick("start", "end", "step")).indices(shape[dim])
        elif call.name == "narrow":
            start = call["start"] % shape[dim]
        elif call.name in CHUNKS:
            start = sum(
                call.model.shape_of(part)[dim] for part in call.node.meta["val"][: call.item]
            )
        else:  # one index of a dimension: a slice, then a view without that dimension
            start = (call["index"] if call.name == "select" else call.item) % shape[dim]
            cut = (*shape[:dim], 1, *shape[dim + 1 :])
            part = Request("slice", (call.x,), SliceAttrs(dim, start), cut)
            return [part, Request("view", (PREVIOUS,))]
        return Request("slice", (call.x,), SliceAttrs(dim, start, step))

    def needs(self, split: Split[SliceAttrs]) -> tuple[Need, ...]:
        attrs, shape = split.layer.attrs, split.layer.operands[0].shape
        read = window(split.dim_ranges(attrs.dim), 1, attrs.step, -attrs.start)
        return (Need(Layout.of(shape, split.but(attrs.dim, read))),)

    def run(self, local: Local[SliceAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        step = local.attrs.step
        if step == 1:
            return tensors[0]
        return tensors[0][(slice(None),) * local.attrs.dim + (slice(None, None, step),)]


@dataclass(frozen=True)
class PadAttrs:
    pads: Pads
    mode: str
    value: float


@operator("pad", "pad", "constant_pad_nd")
class Pad(Moves):
    """Zero (or constant) padding, cropping included: the transfer's fill does it."""

    reads_beyond = True
    part_of_layer = True

    def read(self, call: Call) -> Request | Requests | None:
        mode, shape = call.args.get("mode", "constant"), call.shape()
        if mode == "circular" and min(call["pad"]) < 0:  # torch cuts off, then wraps
            return None
        flat = [*call["pad"], *[0] * (2 * len(shape) - len(call["pad"]))]
        pads = tuple((flat[2 * i], flat[2 * i + 1]) for i in reversed(range(len(shape))))
        if mode != "constant":
            return EdgePad.along(call.x, shape, pads, mode)
        return Request("pad", (call.x,), PadAttrs(pads, mode, call["value"] or 0))

    def needs(self, split: Split[PadAttrs]) -> tuple[Need, ...]:
        attrs, shape = split.layer.attrs, split.layer.operands[0].shape
        pairs = zip(split.all_ranges(), attrs.pads, strict=True)
        ranges = [(found - left) * split.used[:, None] for found, (left, _) in pairs]
        return (Need(Layout.of(shape, ranges), float(attrs.value)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]


@dataclass(frozen=True)
class EdgePadAttrs(DimAttrs):
    mode: str  # circular, reflect or replicate
    edges: tuple[int, int]


@operator("edge_pad")
class EdgePad(Moves):
    """Circular, reflecting and replicating padding of one dimension.

    The operand is needed three times: what lies left of it, itself, and what lies right of it.
    """

    part_of_layer = True

    @staticmethod
    def along(x: Any, shape: Shape, pads: Pads, mode: str) -> Requests:
        """Padding with the tensor's own values, one dimension after the other."""
        made, found = list(shape), []
        for dim, edges in enumerate(pads):
            if any(edges):
                made[dim] += sum(edges)
                attrs = EdgePadAttrs(dim, mode, edges)
                tensors = (PREVIOUS if found else x,) * 3
                found.append(Request("edge_pad", tensors, attrs, tuple(made)))
        return found

    def needs(self, split: Split) -> tuple[Need, ...]:
        return tuple(Need(Layout.of(split.layer.operands[0].shape, r)) for r in self._parts(split))

    def _parts(self, split: Split[EdgePadAttrs]) -> list[list[Ranges]]:
        dim, size, left, right = _padded_dim(split.layer)
        start, stop = (split.dim_ranges(dim) - left).T
        parts = []
        for low, high, source in _edge_sources(split.layer.attrs.mode, size, left, right):
            a, b = np.maximum(start, low), np.minimum(stop, high)
            cut = source(a, b)
            keep = ((b > a) & split.used)[:, None]
            parts.append(split.but(dim, np.stack(cut, axis=1) * keep))
        return parts

    def run(self, local: Local[EdgePadAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        dim, size, left, right = _padded_dim(local.layer)
        mode = local.attrs.mode
        start, stop = local.output.starts[dim] - left, local.output.stops[dim] - left
        parts = []
        edges = [(-left, 0), (0, size), (size, size + right)]
        for tensor, box, (low, high) in zip(tensors, local.needs, edges, strict=True):
            count = min(stop, high) - max(start, low)
            if box.empty or count <= 0:
                continue
            if low != 0 or high != size:
                if mode == "reflect":
                    tensor = tensor.flip(dim)
                elif mode == "replicate":
                    shape = list(tensor.shape)
                    shape[dim] = count
                    tensor = tensor.expand(shape)
            parts.append(tensor)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _padded_dim(layer: Layer[EdgePadAttrs]) -> tuple[int, int, int, int]:
    """The dimension that is padded, its size and the padding left and right."""
    dim = layer.attrs.dim
    left, right = layer.attrs.edges
    return dim, layer.operands[0].shape[dim], left, right


def _edge_sources(mode: str, size: int, left: int, right: int) -> list:
    """For each of the three parts: its range and where an interval [a, b) of it comes from."""

    last = size - 1
    before, behind = {
        "circular": (lambda a, b: (a + size, b + size), lambda a, b: (a - size, b - size)),
        "reflect": (lambda a, b: (1 - b, 1 - a), lambda a, b: (last + size - b, last + size - a)),
        "replicate": (lambda a, b: (a * 0, a * 0 + 1), lambda a, b: (a * 0 + last, a * 0 + size)),
    }[mode]
    return [(-left, 0, before), (0, size, lambda a, b: (a, b)), (size, size + right, behind)]


@dataclass(frozen=True)
class PixelShuffleAttrs:
    factor: int


@operator("pixel_shuffle", "pixel_shuffle")
class PixelShuffle(Moves):
    """Depth to space: r*r channels become a square of r x r positions."""

    def read(self, call: Call) -> Request | None:
        if len(call.shape()) != 4:
            return None
        return Request("pixel_shuffle", (call.x,), PixelShuffleAttrs(call["upscale_factor"]))

    def needs(self, split: Split[PixelShuffleAttrs]) -> tuple[Need, ...]:
        shape, r = split.layer.operands[0].shape, split.layer.attrs.factor
        space = [rows(split.dim_ranges(dim), r) for dim in (2, 3)]
        ranges = [split.dim_ranges(0), split.dim_ranges(1) * r * r, *space]
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local[PixelShuffleAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        r, held = local.attrs.factor, local.needs[0]
        y = torch.pixel_shuffle(tensors[0], r)
        starts = (*local.output.starts[:2], held.starts[2] * r, held.starts[3] * r)
        stops = (*local.output.stops[:2], held.stops[2] * r, held.stops[3] * r)
        return narrow(y, Box(starts, stops), local.output)
