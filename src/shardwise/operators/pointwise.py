"""Operators that compute each output element from the same place of their operands."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shardwise.geometry.layout import Layout
from shardwise.graph.labels import Shape, default_dims
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request, as_called, draws, overloads_of, tensor_nodes
from shardwise.operators.follow import follow, same
from shardwise.operators.splits import Split
from shardwise.operators.strategy import (
    Function,
    Inputs,
    Local,
    Need,
    Strategy,
    broadcast,
    operator,
)


@operator("input")
class Input(Strategy):
    """A tensor the user gives; its config says which part each rank reads from the data set."""

    keeps_inputs, draws = False, False

    def labels(self, attrs: None, shape: Shape, inputs: Inputs) -> str:
        return "n" if len(shape) == 1 else default_dims(shape)

    def needs(self, split: Split) -> tuple[Need, ...]:
        return ()

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        raise AssertionError("an input is given")


# What torch does not call pointwise itself, but is: see `is_pointwise`.
POINTWISE = frozenset(
    """
    to type_as contiguous detach fill zero hardswish log_sigmoid relu6 selu square __and__ __or__
    __xor__ __lshift__ __rshift__ complex polar _conj _neg_view resolve_conj resolve_neg real imag
    conj floor_divide mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
    binary_cross_entropy_with_logits
    """.split()  # noqa: SIM905 (a word list reads better)
)


OVERLOADED = ("max", "min")  # of two tensors, or along a dimension


def is_pointwise(call: Call) -> bool:
    """Whether each element of the result comes from the same place of all tensors."""
    target: Any = call.node.target
    ours = call.name in POINTWISE or is_called_pointwise(call.name)
    also = call.name not in OVERLOADED or torch.Tag.pointwise in target.tags
    return ours and also and not draws(call.node)


@cache
def is_called_pointwise(name: str) -> bool:
    """Whether torch says so of an ATen operator; it may forget some overloads, in place say."""
    overloads = overloads_of(getattr(torch.ops.aten, name, None))
    return any(torch.Tag.pointwise in each.tags for each in overloads)


# What the backward pass of an operator reads; all others read their operands.
KEEP_NOTHING = frozenset("add sub neg rsub clone to _to_copy alias detach zeros_like".split())  # noqa: SIM905
KEEP_OUTPUT = frozenset("relu sigmoid tanh exp sqrt hardsigmoid elu".split())  # noqa: SIM905


@operator("pointwise", *POINTWISE)
class Pointwise(Strategy):
    """Unary and broadcasting operators, called as they are on the local parts."""

    keeps_inputs, draws = False, False
    as_called = True

    def read(self, call: Call) -> Request | None:
        reduces = call.args.get("reduction", 0)  # of a loss: see parts.py
        if not is_pointwise(call) or reduces:
            return None
        if call.item is not None:  # one of several results
            return follow(call, [(x, same(call, x)) for x in tensor_nodes(call.node)])
        return as_called("pointwise", call, overwrites=True)

    def ends_gradient(self, layer: Layer) -> bool:
        return layer.traits.called == "detach"

    def makes_new_tensor(self, layer: Layer) -> bool:
        return layer.traits.called in ("add", "sub")

    def keeps(self, layer: Layer) -> bool:
        return layer.traits.called not in {*KEEP_NOTHING, *KEEP_OUTPUT}

    def keeps_output(self, layer: Layer) -> bool:
        return layer.traits.called in KEEP_OUTPUT

    def needs(self, split: Split) -> tuple[Need, ...]:
        return tuple(Need(broadcast(split, o.shape)) for o in split.layer.operands)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        if local.moved and local.layer.traits.called == "relu":
            return SignReLU.apply(*tensors)  # type: ignore[return-value]
        return local.layer.call(tensors, local.in_place)

    def lower(self, local: Local) -> Function:
        signs = local.moved and local.layer.traits.called == "relu"
        return (
            super().lower(local)
            if signs or not self.as_called
            else local.layer.caller(local.in_place)
        )


class SignReLU(torch.autograd.Function):
    """ReLU that keeps the signs, a byte each, instead of its output.

    The stock one is free where the next layer keeps that output anyway, but not where that layer
    keeps a gathered copy: without this, a rank of a U-Net split in four needs 37 % of the memory
    of one device, with it 34 % (benchmarks/memory.py).
    """

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = torch.relu(x)
        ctx.save_for_backward(y <= 0)
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (cut_off,) = ctx.saved_tensors
        return gradient.masked_fill(cut_off, 0)  # infinities and NaN too


@operator("prelu", "prelu")
class PReLU(Pointwise):
    """A slope per channel, or one for all; the slope is not broadcast from the right."""

    as_called = False

    def read(self, call: Call) -> Request:
        return Request("prelu", call.pick("self", "weight"))

    def needs(self, split: Split) -> tuple[Need, ...]:
        x, weight = split.layer.operands
        size = weight.shape[0]
        slopes = split.whole(1) if size == 1 else split.dim_ranges(1)
        return Need(broadcast(split, x.shape)), Need(Layout.of(weight.shape, [slopes]))

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.prelu(*tensors)


@operator("expand", "expand", "expand_as")
class Expand(Pointwise):
    """Broadcasting to a larger shape."""

    free = True
    as_called = False

    def read(self, call: Call) -> Request:
        return Request("expand", (call.x,))

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].expand(local.output.shape)
