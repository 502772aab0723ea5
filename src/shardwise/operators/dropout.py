"""Dropout and coins: the random numbers that one device would draw, whatever the split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise.geometry.box import Box
from shardwise.graph.layer_graph import Traits
from shardwise.operators.calls import Call, Request
from shardwise.operators.pointwise import Pointwise
from shardwise.operators.strategy import Local, is_active, operator


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


@operator("bernoulli", "bernoulli")
class Bernoulli(Pointwise):
    """Coins with given chances: every rank tosses all, with some chance where it knows none."""

    draws = True
    as_called = False

    def read(self, call: Call) -> Request | None:
        if "p" in call.args:  # of other overloads
            return None
        memory = call.model.memory_order_of(call.x) or (0,)
        return Request("bernoulli", (call.x,), traits=Traits(memory=memory))

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        (x,), shape, order = tensors, local.layer.shape, local.layer.traits.memory
        assert order is not None
        own = local.output.slices_in(Box.whole(shape))
        chances = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).fill_(0.5)
        chances[own] = x
        return torch.bernoulli(chances)[own]
