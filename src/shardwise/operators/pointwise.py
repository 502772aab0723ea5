"""Operators that compute each output element from the same place of their operands."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer, Traits
from shardwise.operators.calls import Call, Request, bare, draws, tensor_nodes
from shardwise.operators.splits import Split
from shardwise.operators.strategy import (
    Function,
    Local,
    Need,
    Strategy,
    broadcast,
    is_active,
    operator,
)


@operator("input")
class Input(Strategy):
    """A tensor the user gives; its config says which part each rank reads from the data set."""

    keeps_inputs, draws = False, False
    labels_by_position = True

    def needs(self, split: Split) -> tuple[Need, ...]:
        return ()

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        raise AssertionError("an input is given")


UNARY = """
    abs acos acosh asin asinh atan atanh ceil celu clamp clamp_max clamp_min cos cosh elu erf erfc
    exp expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log log10 log1p
    log2 log_sigmoid logit logical_not mish nan_to_num neg reciprocal relu relu6 round rsqrt selu
    sigmoid sign silu sin sinh softplus softshrink sqrt square tan tanh threshold trunc to clone
    contiguous type_as bitwise_not detach isnan isinf isfinite
""".split()  # noqa: SIM905 (a word list reads better)
BINARY = """
    add sub rsub mul div maximum minimum pow where eq ne lt le gt ge logical_and logical_or
    logical_xor atan2 fmod remainder lerp addcmul addcdiv masked_fill
    bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ fill zero
""".split()  # noqa: SIM905
POINTWISE = frozenset(UNARY + BINARY)

# Operators whose derivative is another one in place: from the result, or none at all.
OTHERWISE_IN_PLACE = frozenset(
    """
    elu selu celu leaky_relu rrelu eq ne lt le gt ge logical_and logical_or logical_xor logical_not
    """.split()  # noqa: SIM905
)


def as_called(op: str, call: Call, overwrites: bool = False) -> Request:
    """A layer that runs the call itself, on parts of its tensors or on the whole ones."""
    traits = Traits(
        called=bare(call.name),
        written=call.in_place,
        in_place=call.in_place and overwrites,
        on_a_copy=call.in_place and call.name in OTHERWISE_IN_PLACE,
        draws=draws(call.node),
    )
    return Request(op, tuple(tensor_nodes(call.node)), traits=traits)


# What the backward pass of an operator reads; all others read their operands.
KEEP_NOTHING = frozenset("add sub neg rsub clone to _to_copy alias detach zeros_like".split())  # noqa: SIM905
KEEP_OUTPUT = frozenset("relu sigmoid tanh exp sqrt hardsigmoid elu".split())  # noqa: SIM905


@operator("pointwise", *POINTWISE)
class Pointwise(Strategy):
    """Unary and broadcasting operators, called as they are on the local parts."""

    keeps_inputs, draws = False, False
    as_called = True

    def read(self, call: Call) -> Request | None:
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


@dataclass(frozen=True)
class DropoutAttrs:
    p: float


@operator("dropout", "dropout")
class Dropout(Pointwise):
    """Dropout whose mask does not depend on the split.

    Every rank draws the mask of the whole tensor, as one device would, and uses its own part.
    Ranks with the same seed therefore compute exactly what one device computes.
    """

    draws = True
    as_called = False
    keeps_bytes = 4  # the mask
    feature = False  # whole channels are dropped

    def read(self, call: Call) -> Request:
        memory = call.model.memory_order_of(call.x) or (0,)
        traits = replace(call.mode(call["train"]), memory=memory)
        return Request(self.op, (call.x,), DropoutAttrs(call["p"]), traits=traits)

    def run(self, local: Local[DropoutAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,) = tensors
        is_module = isinstance(local.module, nn.modules.dropout._DropoutNd)
        p = local.module.p if is_module else local.attrs.p  # a module's p may change
        shape = local.layer.shape
        if not is_active(local) or p == 0 or 0 in shape:
            return x
        if p == 1:  # torch draws nothing then
            return x * 0.0
        if self.feature:
            shape = shape[:2] + (1,) * (len(shape) - 2)
        order = local.layer.traits.memory
        assert order is not None
        mask = _draw(x, shape, order, p, fused=x.is_cuda and not self.feature)
        box = local.output.slices_in(local.output.whole(local.layer.shape))
        mask = mask[box[:2]] if self.feature else mask[box]
        return x * mask * (1 / (1 - p))


def _draw(
    x: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...], p: float, fused: bool
) -> torch.Tensor:
    """The mask one device would draw, in its order of memory; CUDA has a kernel of its own."""
    dtype = x.dtype if x.is_cuda else torch.bool
    whole = torch.empty_permuted(shape, order, dtype=dtype, device=x.device)
    return torch.native_dropout(whole, p, True)[1] if fused else whole.bernoulli_(1 - p)


@operator("feature_dropout", "feature_dropout")
class FeatureDropout(Dropout):
    feature = True
