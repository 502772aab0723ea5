"""Operators that compute each output element from the same place of their operands."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators.strategy import Local, Need, Split, Strategy, broadcast, narrow


class Input(Strategy):
    """A tensor the user gives; its config says which part each rank reads from the data set."""

    def needs(self, split: Split) -> tuple[Need, ...]:
        return ()


# What the backward pass of an operator reads; all others read their operands.
KEEP_NOTHING = frozenset("add sub neg rsub clone to _to_copy alias detach zeros_like".split())  # noqa: SIM905
KEEP_OUTPUT = frozenset("relu sigmoid tanh exp sqrt hardsigmoid elu".split())  # noqa: SIM905


class Pointwise(Strategy):
    """Unary and broadcasting operators, called as they are on the local parts."""

    def keeps(self, layer: Layer) -> bool:
        return layer.attrs.get("called") not in {*KEEP_NOTHING, *KEEP_OUTPUT}

    def keeps_output(self, layer: Layer) -> bool:
        return layer.attrs.get("called") in KEEP_OUTPUT

    def needs(self, split: Split) -> tuple[Need, ...]:
        return tuple(Need(broadcast(split, o.shape)) for o in split.layer.operands)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        if local.moved and local.attrs["called"] == "relu":
            return SignReLU.apply(*tensors)  # type: ignore[return-value]
        return local.layer.call(tensors, local.in_place)


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


class PReLU(Pointwise):
    """A slope per channel, or one for all; the slope is not broadcast from the right."""

    def needs(self, split: Split) -> tuple[Need, ...]:
        x, weight = split.layer.operands
        size = weight.shape[0]
        slopes = split.whole(1) if size == 1 else split.dim_ranges(1)
        return Need(broadcast(split, x.shape)), Need(Layout.of(weight.shape, [slopes]))

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.prelu(*tensors)


class Expand(Pointwise):
    """Broadcasting to a larger shape."""

    free = True

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].expand(local.output.shape)


class Dropout(Pointwise):
    """Dropout whose mask does not depend on the split.

    Every rank draws the mask of the whole tensor, as one device would, and uses its own part.
    Ranks with the same seed therefore compute exactly what one device computes.
    """

    draws = True
    keeps_bytes = 4  # the mask
    feature = False  # whole channels are dropped

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,) = tensors
        is_module = isinstance(local.module, nn.modules.dropout._DropoutNd)
        p = local.module.p if is_module else local.attrs["p"]  # a module's p may change
        shape = local.layer.shape
        if not is_active(local) or p == 0 or 0 in shape:
            return x
        if p == 1:  # torch draws nothing then
            return x * 0.0
        if self.feature:
            shape = shape[:2] + (1,) * (len(shape) - 2)
        mask = _draw(x, shape, local.attrs["memory"], p, fused=x.is_cuda and not self.feature)
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


class FeatureDropout(Dropout):
    feature = True


def is_active(local: Local) -> bool:
    """Whether a layer with two modes behaves as in training."""
    if local.attrs["never"]:
        return False
    return local.attrs["always"] or local.module.training


class Made(Strategy):
    """A tensor that depends only on shapes and perhaps on random numbers.

    Every rank makes all of it, as one device would, and keeps its own part: nothing is sent, and
    generators of random numbers stay in step.
    """

    def needs(self, split: Split) -> tuple[Need, ...]:
        return ()

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        made = local.layer.call([], device=local.device).reshape(local.layer.shape)
        return narrow(made, Box.whole(local.layer.shape), local.output)


class Opaque(Strategy):
    """An operator with no strategy: it runs whole, on one worker.

    One that uses random numbers runs on all, so that generators stay in step; the others forget
    what came of it.
    """

    always_runs = True

    def axes(self, layer: Layer) -> dict[str, int]:
        return {}

    def needs(self, split: Split) -> tuple[Need, ...]:
        everybody = split.layer.attrs.get("draws", False)
        ranks = range(split.world) if everybody else split.config.ranks
        return tuple(Need(Layout.on(o.shape, split.world, ranks)) for o in split.layer.operands)

    def output(self, split: Split) -> Layout:
        return Layout.on(split.layer.shape, split.world, split.config.ranks)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        result = local.layer.call(tensors)
        item = local.attrs["item"]
        made, layer = result if item is None else result[item], local.layer
        if tuple(made.shape) != (() if layer.scalar else layer.shape):
            raise ShardwiseError(
                f"layer {layer.name!r} ({layer.attrs['called']}) made a tensor of shape "
                f"{tuple(made.shape)} where torch.export had announced {layer.shape}"
            )
        y = made.reshape(layer.shape)
        return y.reshape(-1)[:0].reshape(local.output.shape) if local.output.empty else y
