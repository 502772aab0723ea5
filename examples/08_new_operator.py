"""An operator that Shardwise does not know: how it runs before, and after it is described.

    python examples/08_new_operator.py

torch.flip has no strategy, so one worker computes it. Two small entries make it run on all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import shardwise
from shardwise.geometry.layout import Layout
from shardwise.operators import STRATEGIES, Local, Need, Split, Strategy
from shardwise.operators.aten import OPERATORS, Request


def flip_request(args: dict[str, Any], shape: Any) -> Request:
    """From the arguments of the ATen call to an operator of the layer graph."""
    num_dims = len(shape(args["self"]))
    return Request("flip", (args["self"],), {"flipped": tuple(d % num_dims for d in args["dims"])})


class Flip(Strategy):
    """A block of the output is the mirrored block of the operand."""

    def needs(self, split: Split) -> tuple[Need, ...]:
        ranges = []
        for dim, size in enumerate(split.layer.shape):
            cut = split.dim_ranges(dim)
            if dim in split.layer.attrs["flipped"]:
                mirrored = np.stack([size - cut[:, 1], size - cut[:, 0]], axis=1)
                cut = mirrored * split.used[:, None]  # ranks without a part need nothing
            ranges.append(cut)
        return (Need(Layout.of(split.layer.shape, ranges)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].flip(local.attrs["flipped"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flip(self.conv(x), [2]) * 2


def compare() -> tuple[str, str, float]:
    """What every worker does: the plan before and after, and the largest error."""
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 3, 9, 7).double()
    before = str(shardwise.Plan.uniform(shardwise.capture(net, x), h=3))
    OPERATORS["flip"], STRATEGIES["flip"] = flip_request, Flip()
    plan = shardwise.Plan.uniform(shardwise.capture(net, x), h=3)
    model = shardwise.parallelize(net, plan)
    error = float((model(x) - net(x)).detach().abs().max())
    return before, str(plan), error


if __name__ == "__main__":
    before, after, error = shardwise.run_local(compare, 3)[0]
    print(f"before: {before}\nafter: {after}\nlargest error {error:.1e}")
    assert error < 1e-9
