"""First weights, as fillers say."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from .messages import ProtoMessage


@torch.no_grad()
def fill(weight: Tensor, filler: ProtoMessage, default: float = 0.0) -> None:
    """Fills a weight; where no filler was written, with one number."""
    if not filler.written:
        weight.fill_(default)
        return
    kind = filler.type
    if kind == "constant":
        weight.fill_(filler.value)
    elif kind == "uniform":
        weight.uniform_(filler.min, filler.max)
    elif kind == "gaussian":
        weight.normal_(filler.mean, filler.std)
        if filler.sparse >= 0:  # so many inputs of each output, on average
            weight.mul_(torch.rand_like(weight) < filler.sparse / weight.shape[0])
    elif kind == "xavier":
        bound = sqrt(3 / _fan(weight, filler))
        weight.uniform_(-bound, bound)
    elif kind == "msra":
        weight.normal_(0, sqrt(2 / _fan(weight, filler)))
    elif kind == "bilinear":
        _fill_bilinear(weight, filler)
    else:
        raise filler.wrong(f"there is no filler {kind!r}", "type")


def _fan(weight: Tensor, filler: ProtoMessage) -> float:
    fan_in = weight.numel() / weight.shape[0]
    fan_out = weight.numel() / (weight.shape[1] if weight.ndim > 1 else 1)
    average = (fan_in + fan_out) / 2
    return {"FAN_IN": fan_in, "FAN_OUT": fan_out, "AVERAGE": average}[filler.variance_norm]


def _fill_bilinear(weight: Tensor, filler: ProtoMessage) -> None:
    """Weights of an interpolation, for a deconvolution that enlarges."""
    if weight.ndim != 4 or weight.shape[2] != weight.shape[3]:
        raise filler.wrong("a bilinear filler needs a square kernel in two dimensions")
    size = weight.shape[3]
    factor = (size + 1) // 2
    centre = (2 * factor - 1 - factor % 2) / (2 * factor)
    line = (
        1 - (torch.arange(size, dtype=weight.dtype, device=weight.device) / factor - centre).abs()
    )
    weight.copy_((line[:, None] * line).expand_as(weight))
