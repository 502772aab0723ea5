"""Layers that are no convolutions but have a kernel too: timed against torch's, as those are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from shardwise.kernels.batch_norm import FusedBatchNorm2d
from shardwise.kernels.conv_shape import PRECISIONS, memory_format, strictly_last
from shardwise.kernels.dispatch import STOCK
from shardwise.kernels.max_pool import FastMaxPool2d
from shardwise.kernels.tuner import MARGIN, Tuner, interleaved

OWN: dict[type, type[nn.Module]] = {nn.BatchNorm2d: FusedBatchNorm2d, nn.MaxPool2d: FastMaxPool2d}


def adopt(layer: nn.Module, x: torch.Tensor, tuner: Tuner, relu: bool) -> None:
    """Makes a layer run on our kernel if that trains it, and the ReLU that follows, faster."""
    own = OWN.get(type(layer))
    known = x.ndim == 4 and x.dtype in PRECISIONS and x.device.type == "cpu" and x.numel() > 0
    if own is None or not known:
        return
    last, sizes = strictly_last(x), "x".join(map(str, x.shape))
    key = f"{own.__name__}({layer.extra_repr()}) {sizes} {last} {PRECISIONS[x.dtype]} {relu}"
    times = tuner.winners.seconds.setdefault(key, {}).setdefault("step", {})
    if not times.keys() >= {STOCK, own.__name__}:
        times.update(interleaved(_steps(layer, own, x, last, relu)))
        tuner.winners.save()
    if times[own.__name__] <= MARGIN * times[STOCK]:
        layer.__class__ = own


def _steps(
    layer: nn.Module, own: type[nn.Module], like: torch.Tensor, last: bool, relu: bool
) -> dict[str, Callable[[], object]]:
    """Forward and backward of copies of the layer, in training, on random numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(like.shape, dtype=like.dtype, memory_format=memory_format(last))
    x.normal_(generator=generator).requires_grad_()
    stock, fast = (copy.deepcopy(layer).train() for _ in range(2))
    fast.__class__ = own
    if relu:
        stock, fast.relu = nn.Sequential(stock, nn.ReLU(inplace=True)), True  # type: ignore[assignment]

    def step(one: nn.Module) -> Callable[[], object]:
        def run() -> None:
            with torch.enable_grad():
                y = one(x)
                torch.autograd.grad(y, x, torch.ones_like(y))

        return run

    return {STOCK: step(stock), own.__name__: step(fast)}
