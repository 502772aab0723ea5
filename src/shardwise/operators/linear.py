"""Products with a weight, over channels: what convolutions share, and linear layers.

x_NCHW, w_FCRS, y_NFHW. P2's stationary-x is a split of c, stationary-y of f, stationary-w of both.
A rank with coordinates (c, f) holds the weight block (f, c), needs the input channels of block c
and computes a partial sum of the filters of block f; partial sums are added over c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import torch
from torch import fx
from torch.nn import functional

from shardwise.geometry.layout import Layout
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import (
    PREVIOUS,
    Call,
    Request,
    Requests,
    aten_name,
    of_samples,
    reshaped,
)
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Inputs, Local, Need, Strategy, operator, whole


class Contraction(Strategy):
    """Samples, space, filters and input channels may all be split."""

    channel_dim = 1
    contracts = True
    joint_channels = False
    keeps_inputs, draws = True, False

    def partial(self, split: Split) -> Layout | None:
        if split.config.c == 1:
            return None
        shape, dim = split.layer.shape, self.channel_dim
        return Layout.of(shape, split.but(dim, split.ranges(shape[dim], "f")))

    def bias(self, split: Split) -> tuple[Need, ...]:
        """If there is one, only the first of the ranks whose partial sums are added carries it."""
        if len(split.layer.operands) < 3:
            return ()
        num_filters = split.layer.shape[self.channel_dim]
        first = (split.coordinates["c"] == 0)[:, None]
        return (Need(Layout.of((num_filters,), [split.ranges(num_filters, "f") * first])),)


class GatheredLinear(torch.autograd.Function):
    """A linear layer whose weights' gradient every rank computes whole, for all samples (P3).

    Inputs and errors are gathered while the backward pass goes on; the runtime says when the
    gradient is computed from them.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, local):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.local = local
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        if of_weight or of_bias:
            starts = zip(ctx.local.gather, (x, dy), strict=True)
            coming = tuple(start(t) for start, t in starts)
            wanted = of_weight, of_bias, len(ctx.local.needs) > 2
            ctx.local.later(partial(_gathered_gradients, coming, *wanted))
        return dy @ weight if of_x else None, None, None, None


def _gathered_gradients(
    coming: tuple[Callable[[], torch.Tensor], ...], of_weight: bool, of_bias: bool, has_bias: bool
) -> list[torch.Tensor | None]:
    """The gradients of weight and, if any, bias, from the inputs and errors of all samples."""
    inputs, errors = (wait().flatten(0, -2) for wait in coming)
    found = [errors.T @ inputs if of_weight else None, errors.sum(0) if of_bias else None]
    return found[: 1 + has_bias]


USUAL = ("nc", "nwc", "nhwc", "ndhwc")  # labels, by the number of dimensions
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")


def _rows_apart(call: Call) -> Shape | None:
    """What the rows of a linear layer are made of, where they are views before and after it.

    nn.MultiheadAttention makes rows of steps and samples, in this order, which cannot be split over
    samples; the layer may as well see them apart.
    """
    users = [user for user in call.node.users if aten_name(user) in VIEWS]
    shapes = {call.shape(user)[:-1] for user in users}
    lead = min(shapes, default=())
    is_view = isinstance(call.x, fx.Node) and aten_name(call.x) in VIEWS
    if not is_view or len(users) < len(call.node.users) or len(shapes) != 1:
        return None
    fits = len(call.result) == 2 < len(lead) + 1 <= len(USUAL[-1]) and prod(lead) == call.result[0]
    return lead if fits and all(lead) else None


@operator("linear", "linear")
class Linear(Contraction):
    """y[..., f] = sum over c of x[..., c] w[f, c] + b[f]."""

    channel_dim = -1
    fully_connected = True

    def read(self, call: Call) -> Request | Requests | None:
        if len(call.shape(call["weight"])) != 2:  # one filter, of an output without a dimension
            return None
        request = Request("linear", call.pick("input", "weight", "bias"))
        made, lead = call.result, _rows_apart(call)
        if lead is not None:
            before = Request("view", (call.x.args[0],), shape=(*lead, call.shape()[-1]))
            others = {"tensors": (PREVIOUS, *request.tensors[1:]), "shape": (*lead, made[-1])}
            return [before, replace(request, **others)]
        if len(made) > len(USUAL[-1]):  # one dimension of rows is as good as many
            rows = prod(made[:-1])
            return reshaped(call, request, (rows, call.shape()[-1]), (rows, made[-1]), "nc")
        return of_samples(call, request, num_dims=0)

    def labels(self, attrs: None, shape: Shape, inputs: Inputs) -> str:
        """The last dimension has channels, and what had them before has its label instead."""
        usual = USUAL[len(shape) - 2]
        known = next((dims for _, dims in inputs if len(dims) == len(shape)), usual)
        lead = known[:-1] if known[-1] == "c" else known[:-1].replace("c", known[-1])
        found = [*lead, "c"]
        for dim, label in enumerate(usual):
            found[dim] = label if found[dim] == "." and label not in found else found[dim]
        return "".join(found)

    def makes_new_tensor(self, layer: Layer) -> bool:
        return True

    def axes(self, layer: Layer) -> dict[str, int]:
        num_filters, num_channels = layer.operands[1].shape
        return super().axes(layer) | {"f": num_filters, "c": num_channels}

    def needs(self, split: Split) -> tuple[Need, ...]:
        x, weight = split.layer.operands[:2]
        filters, channels = weight.shape
        lead = [split.dim_ranges(dim) for dim in range(len(x.shape) - 1)]
        inputs = Layout.of(x.shape, [*lead, split.ranges(channels, "c")])
        block = Layout.of(weight.shape, [split.ranges(filters, "f"), split.ranges(channels, "c")])
        return Need(inputs), Need(block), *self.bias(split)

    def can_gather(self, layer: Layer) -> bool:
        return all(operand.kind == "param" for operand in layer.operands[1:])

    def gathers(self, split: Split) -> tuple[tuple[Layout, Layout], ...]:
        if split.config.gradient == "sum" or split.config.n == 1:
            return ()
        held = self.needs(split)[0].layout, self.output(split)
        return tuple((layout, whole(split, layout.shape)) for layout in held)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        x, weight, bias = [*tensors, None][:3]
        bias = bias if bias is not None and bias.numel() else None
        if local.gather:
            x = x if x.numel() else x.reshape(*x.shape[:-1], weight.shape[1])  # no samples here
            y: torch.Tensor = GatheredLinear.apply(x, weight, bias, local)  # type: ignore
            return y.reshape(local.output.shape)
        return functional.linear(x, weight, bias)

    def flops(self, split: Split) -> np.ndarray:
        rows = (self.partial(split) or self.output(split)).numels
        weight = self.needs(split)[1].layout
        return 2.0 * rows * (weight.bounds[:, 1, 1] - weight.bounds[:, 1, 0])
