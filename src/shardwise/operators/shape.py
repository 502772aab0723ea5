"""Operators that only move elements: views, permutations, concatenation, slices, padding."""

from __future__ import annotations

from functools import reduce
from math import prod

import numpy as np
import torch

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import view_groups
from shardwise.graph.layer_graph import Layer
from shardwise.operators.strategy import Local, Need, Split, Strategy, narrow


class Moves(Strategy):
    """Operators that compute nothing."""

    def flops(self, split: Split) -> np.ndarray:
        return np.zeros(split.world)


class View(Moves):
    """Any reshape: view, flatten, squeeze, unsqueeze.

    Dimensions fall into groups that hold the same elements before and after. In each group the
    leading dimension is cut to the rows that contain the block, the others are needed whole; the
    block is cut out of these rows after the reshape.
    """

    free = True

    def needs(self, split: Split) -> tuple[Need, ...]:
        source, target = split.layer.operands[0].shape, split.layer.shape
        if 0 in source:
            return (Need(Layout.on(source, split.world, ())),)
        ranges: list[Ranges] = [split.whole(size) for size in source]
        for ins, outs in view_groups(source, target):
            in_lead, out_lead = _lead(ins, source), _lead(outs, target)
            if in_lead is None or out_lead is None:
                continue
            row_in = prod(source[d] for d in ins) // source[in_lead]
            row_out = prod(target[d] for d in outs) // target[out_lead]
            flat = split.dim_ranges(out_lead) * row_out
            ranges[in_lead] = np.stack([flat[:, 0] // row_in, -(-flat[:, 1] // row_in)], axis=1)
        layout = Layout.of(source, ranges)
        empty = self.output(split).numels == 0  # also where the empty dimension is not the lead
        if empty.any():
            layout = Layout.of(source, [r * ~empty[:, None] for r in ranges])
        return (Need(layout),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Rows are flattened group by group, cut to whole output rows, and reshaped."""
        (x,) = tensors
        source, target = local.layer.operands[0].shape, local.layer.shape
        held, out = local.needs[0], local.output
        flat_sizes, flat_cuts, rows = [], [], list(target)
        for ins, outs in view_groups(source, target):
            size = prod(held.shape[d] for d in ins)
            flat_sizes.append(size)
            in_lead, out_lead = _lead(ins, source), _lead(outs, target)
            if in_lead is None or out_lead is None:
                flat_cuts.append(slice(None))
                continue
            row_in = prod(source[d] for d in ins) // source[in_lead]
            row_out = prod(target[d] for d in outs) // target[out_lead]
            start = out.starts[out_lead] * row_out - held.starts[in_lead] * row_in
            rows[out_lead] = out.shape[out_lead]
            flat_cuts.append(slice(start, start + rows[out_lead] * row_out))
        if all(
            size == cut_size(cut, size) for cut, size in zip(flat_cuts, flat_sizes, strict=True)
        ):
            y = x.reshape(rows)
        else:
            y = x.reshape(flat_sizes)[tuple(flat_cuts)].reshape(rows)
        lead_box = Box(
            tuple(out.starts[d] if rows[d] != target[d] else 0 for d in range(len(target))),
            tuple(out.stops[d] if rows[d] != target[d] else target[d] for d in range(len(target))),
        )
        return narrow(y, lead_box, out)


def cut_size(cut: slice, size: int) -> int:
    return len(range(*cut.indices(size)))


def _lead(dims: list[int], shape: tuple[int, ...]) -> int | None:
    """The first dimension of a group that is longer than one."""
    return next((d for d in dims if shape[d] > 1), None)


class Permute(Moves):
    def needs(self, split: Split) -> tuple[Need, ...]:
        order = split.layer.attrs["order"]
        ranges = [split.dim_ranges(order.index(dim)) for dim in range(len(order))]
        return (Need(Layout.of(split.layer.operands[0].shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].permute(local.attrs["order"])


class Cat(Moves):
    """Concatenation: a block needs the part of each operand that falls into it."""

    def needs(self, split: Split) -> tuple[Need, ...]:
        dim = split.layer.attrs["dim"]
        ranges = [split.dim_ranges(d) for d in range(len(split.layer.shape))]
        needs, offset = [], 0
        for operand in split.layer.operands:
            size = operand.shape[dim]
            part = np.clip(ranges[dim] - offset, 0, size) * split.used[:, None]
            pieces = [*ranges[:dim], part, *ranges[dim + 1 :]]
            needs.append(Need(Layout.of(operand.shape, pieces)))
            offset += size
        return tuple(needs)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        parts = [t for t, box in zip(tensors, local.needs, strict=True) if not box.empty]
        kind = reduce(torch.promote_types, [t.dtype for t in tensors])  # of those elsewhere too
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, local.attrs["dim"])
        return joined.to(kind)


class Slice(Moves):
    """A strided part of one dimension."""

    free = True

    def needs(self, split: Split) -> tuple[Need, ...]:
        attrs, shape = split.layer.attrs, split.layer.operands[0].shape
        ranges = [split.dim_ranges(dim) for dim in range(len(shape))]
        cut = ranges[attrs["dim"]]
        starts = cut[:, 0] * attrs["step"] + attrs["start"]
        stops = (cut[:, 1] - 1) * attrs["step"] + attrs["start"] + 1
        filled = (cut[:, 1] > cut[:, 0])[:, None]
        ranges[attrs["dim"]] = np.stack([starts, stops], axis=1) * filled
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        step = local.attrs["step"]
        if step == 1:
            return tensors[0]
        return tensors[0][(slice(None),) * local.attrs["dim"] + (slice(None, None, step),)]


class Pad(Moves):
    """Zero (or constant) padding, cropping included: the transfer's fill does it."""

    def needs(self, split: Split) -> tuple[Need, ...]:
        attrs, shape = split.layer.attrs, split.layer.operands[0].shape
        ranges = [split.dim_ranges(d) - attrs["pads"][d][0] for d in range(len(shape))]
        ranges = [r * split.used[:, None] for r in ranges]
        return (Need(Layout.of(shape, ranges), float(attrs["value"])),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]


class EdgePad(Moves):
    """Circular, reflecting and replicating padding of one dimension.

    The operand is needed three times: what lies left of it, itself, and what lies right of it.
    """

    def needs(self, split: Split) -> tuple[Need, ...]:
        return tuple(Need(Layout.of(split.layer.operands[0].shape, r)) for r in self._parts(split))

    def _parts(self, split: Split) -> list[list[Ranges]]:
        dim, size, left, right = _padded_dim(split.layer)
        ranges = [split.dim_ranges(d) for d in range(len(split.layer.shape))]
        start, stop = (ranges[dim] - left).T
        parts = []
        for low, high, source in _edge_sources(split.layer.attrs["mode"], size, left, right):
            a, b = np.maximum(start, low), np.minimum(stop, high)
            cut = source(a, b)
            keep = ((b > a) & split.used)[:, None]
            parts.append([*ranges[:dim], np.stack(cut, axis=1) * keep, *ranges[dim + 1 :]])
        return parts

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        dim, size, left, right = _padded_dim(local.layer)
        mode = local.attrs["mode"]
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


def _padded_dim(layer: Layer) -> tuple[int, int, int, int]:
    """The dimension that is padded, its size and the padding left and right."""
    dim = layer.attrs["dim"]
    left, right = layer.attrs["edges"]
    return dim, layer.operands[0].shape[dim], left, right


def _edge_sources(mode: str, size: int, left: int, right: int) -> list:
    """For each of the three parts: its range and where an interval [a, b) of it comes from."""

    def same(a, b):  # type: ignore[no-untyped-def]
        return a, b

    if mode == "circular":
        return [
            (-left, 0, lambda a, b: (a + size, b + size)),
            (0, size, same),
            (size, size + right, lambda a, b: (a - size, b - size)),
        ]
    if mode == "reflect":
        return [
            (-left, 0, lambda a, b: (-b + 1, -a + 1)),
            (0, size, same),
            (size, size + right, lambda a, b: (2 * size - 1 - b, 2 * size - 1 - a)),
        ]
    return [
        (-left, 0, lambda a, b: (a * 0, a * 0 + 1)),
        (0, size, same),
        (size, size + right, lambda a, b: (a * 0 + size - 1, a * 0 + size)),
    ]


class PixelShuffle(Moves):
    """Depth to space: r*r channels become a square of r x r positions."""

    def needs(self, split: Split) -> tuple[Need, ...]:
        shape, r = split.layer.operands[0].shape, split.layer.attrs["factor"]
        ranges = [split.dim_ranges(0), split.dim_ranges(1) * r * r]
        for dim in (2, 3):
            cut = split.dim_ranges(dim)
            ranges.append(np.stack([cut[:, 0] // r, -(-cut[:, 1] // r)], axis=1))
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        r, held = local.attrs["factor"], local.needs[0]
        y = torch.pixel_shuffle(tensors[0], r)
        starts = (*local.output.starts[:2], held.starts[2] * r, held.starts[3] * r)
        stops = (*local.output.stops[:2], held.stops[2] * r, held.stops[3] * r)
        return narrow(y, Box(starts, stops), local.output)
