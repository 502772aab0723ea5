"""What is not cut: what every rank makes or draws, and operators that nobody has described."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardwise.errors import CaptureError, ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request, as_called, draws, tensor_nodes
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, Strategy, narrow, operator

# What depends only on shapes, and is computed wherever it is wanted.
MADE = frozenset(
    """
    zeros ones full empty arange eye linspace logspace scalar_tensor zeros_like ones_like full_like
    empty_like new_zeros new_ones new_full new_empty tril_indices triu_indices range empty_strided
    new_empty_strided hann_window hamming_window bartlett_window blackman_window kaiser_window
    """.split()  # noqa: SIM905
)

# Operators that fill a tensor with random numbers, whatever was in it.
OVERWRITING = frozenset(
    "bernoulli uniform normal exponential cauchy log_normal geometric random".split()  # noqa: SIM905
)
_BERNOULLI = torch.ops.aten.bernoulli.p


def is_made(call: Call) -> bool:
    """Whether the result depends on nothing but shapes and, perhaps, random numbers."""
    tensors, name = tensor_nodes(call.node), call.name
    if name in MADE:
        return len(tensors) <= (name.endswith("_like") or name.startswith("new_"))
    if not draws(call.node):
        return False
    overwrites = call.in_place and name in OVERWRITING
    only_like = name.endswith("_like") or call.node.target is _BERNOULLI
    return len(tensors) <= (overwrites or only_like)


@operator("made", *MADE)
class Made(Strategy):
    """A tensor that depends only on shapes and perhaps on random numbers.

    Every rank makes all of it, as one device would, and keeps its own part: nothing is sent, and
    generators of random numbers stay in step.
    """

    keeps_inputs, draws = False, False  # `draws` is an attribute of the layer
    as_called = True
    shapes_only = True

    def read(self, call: Call) -> Request | None:
        if not is_made(call):
            return None
        request = as_called("made", call)
        return replace(request, traits=replace(request.traits, written=False, on_a_copy=False))

    def needs(self, split: Split) -> tuple[Need, ...]:
        return ()

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        made = local.layer.call([], device=local.device).reshape(local.layer.shape)
        return narrow(made, Box.whole(local.layer.shape), local.output)


def _check_item(call: Call) -> None:
    """Every result of an operator is a layer that computes it anew: that must be the same."""
    if call.item is None:
        return
    used = [user for user in call.node.users if user.users]
    if len(used) > 1 and draws(call.node):
        raise CaptureError(
            f"{call.name!r} of {call.model.module_of(call.node) or 'the model'!r} uses random "
            "numbers, and several of its results are used; use only one of them"
        )
    if call.name == "native_group_norm" and call.item:
        raise CaptureError(
            "the statistics that 'native_group_norm' returns have no gradient of their own; "
            "compute them with torch.var_mean"
        )


@dataclass(frozen=True)
class ItemAttrs:
    item: int | None  # which of several results


@operator("drawn")
class Drawn(Strategy):
    """Numbers whose drawing depends on values: every rank draws all, and keeps its part."""

    keeps_inputs, draws = True, True
    as_called = True

    def read(self, call: Call) -> Request | None:
        if not draws(call.node) or "::" in call.name:
            return None
        _check_item(call)
        request = as_called("drawn", call)
        memory = call.model.memory_order_of(request.tensors[0])
        return replace(
            request,
            attrs=ItemAttrs(call.item),
            traits=replace(request.traits, memory=memory or (0,)),
        )

    def needs(self, split: Split) -> tuple[Need, ...]:
        layer, world = split.layer, split.world
        return tuple(Need(Layout.replicated(o.shape, world)) for o in layer.operands)

    def run(self, local: Local[ItemAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        layer, order = local.layer, local.layer.traits.memory
        assert order is not None
        result = layer.call([laid_out(tensors[0], order), *tensors[1:]])
        y = result if local.attrs.item is None else result[local.attrs.item]
        return narrow(y.reshape(layer.shape), Box.whole(layer.shape), local.output)


def laid_out(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same numbers in another order of memory, in which torch goes through them."""
    if len(order) != x.ndim:
        return x.contiguous()
    back = [order.index(dim) for dim in range(x.ndim)]
    return x.permute(order).contiguous().permute(back)


@operator("opaque")
class Opaque(Strategy):
    """An operator with no strategy: it runs whole, on one worker.

    One that uses random numbers runs on all, so that generators stay in step; the others forget
    what came of it.
    """

    keeps_inputs, draws = False, False
    always_runs = True
    as_called = True
    known = False

    def read(self, call: Call) -> Request:
        _check_item(call)
        return replace(as_called("opaque", call), attrs=ItemAttrs(call.item))

    def axes(self, layer: Layer) -> dict[str, int]:
        return {}

    def needs(self, split: Split) -> tuple[Need, ...]:
        ranks = range(split.world) if split.layer.traits.draws else split.config.ranks
        return tuple(Need(Layout.on(o.shape, split.world, ranks)) for o in split.layer.operands)

    def output(self, split: Split) -> Layout:
        return Layout.on(split.layer.shape, split.world, split.config.ranks)

    def run(self, local: Local[ItemAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        result = local.layer.call(tensors)
        item = local.attrs.item
        made, layer = result if item is None else result[item], local.layer
        if tuple(made.shape) != (() if layer.scalar else layer.shape):
            raise ShardwiseError(
                f"layer {layer.name!r} ({layer.traits.called}) made a tensor of shape "
                f"{tuple(made.shape)} where torch.export had announced {layer.shape}"
            )
        y = made.reshape(layer.shape)
        return y.reshape(-1)[:0].reshape(local.output.shape) if local.output.empty else y
