"""An operator that Shardwise does not know: how it runs before, and after it is described.

    python examples/08_new_operator.py

torch.flip has no description, so one worker computes it. A small class makes it run on all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import shardwise
from shardwise.geometry.layout import Layout
from shardwise.operators import Call, Local, Need, Request, Split, Strategy, operator


@dataclass(frozen=True)
class FlipAttrs:
    flipped: tuple[int, ...]  # dimensions


class Flip(Strategy):
    """A block of the output is the mirrored block of the operand."""

    keeps_inputs, draws = False, False

    def read(self, call: Call) -> Request:
        """From the arguments of the ATen call to a layer: its tensors and its attributes."""
        flipped = tuple(dim % len(call.shape()) for dim in call["dims"])
        return Request("flip", (call["self"],), FlipAttrs(flipped))

    def needs(self, split: Split[FlipAttrs]) -> tuple[Need, ...]:
        ranges = []
        for dim, size in enumerate(split.layer.shape):
            cut = split.dim_ranges(dim)
            if dim in split.layer.attrs.flipped:
                mirrored = np.stack([size - cut[:, 1], size - cut[:, 0]], axis=1)
                cut = mirrored * split.used[:, None]  # ranks without a part need nothing
            ranges.append(cut)
        return (Need(Layout.of(split.layer.shape, ranges)),)

    def run(self, local: Local[FlipAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].flip(local.attrs.flipped)


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
    operator("flip", "flip")(Flip)  # or @operator("flip", "flip") above the class
    plan = shardwise.Plan.uniform(shardwise.capture(net, x), h=3)
    model = shardwise.parallelize(net, plan)
    error = float((model(x) - net(x)).detach().abs().max())
    return before, str(plan), error


if __name__ == "__main__":
    before, after, error = shardwise.run_local(compare, 3)[0]
    print(f"before: {before}\nafter: {after}\nlargest error {error:.1e}")
    assert error < 1e-9
