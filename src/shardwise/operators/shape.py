"""Operators that only look at elements in another way: views and permutations."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from shardwise.errors import CaptureError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import Shape, default_dims, view_dims, view_groups
from shardwise.operators.calls import Call, Request, as_called, permuted
from shardwise.operators.splits import Split, rows
from shardwise.operators.strategy import Function, Inputs, Local, Need, Strategy, operator


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

    def read(self, call: Call) -> Request | None:
        x, shape = call.shape(), call.result
        if "dtype" in call.args:  # the same memory as numbers of another type
            return as_called("pointwise", call) if x == shape else None
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


@operator("permute", "permute", "transpose", "t", "swapaxes", "swapdims", "numpy_T")
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
