"""A ReLU that the layer before it may have applied already, while the numbers were in the cache."""

from __future__ import annotations

import torch

_MARK = "_shardwise_relu"


def applied(y: torch.Tensor) -> torch.Tensor:
    """Marks the output of a layer that has applied the ReLU; unmarked, it is only applied twice."""
    if not torch.compiler.is_compiling():
        setattr(y, _MARK, True)
    return y


class AppliedReLU(torch.nn.ReLU):
    """The ReLU of numbers that had none: someone may have put another layer before it since."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input if getattr(input, _MARK, False) else super().forward(input)
