"""An operator that Shardwise does not know: how it runs before, and after it is described.

    python examples/08_new_operator.py

torch.matrix_exp has no description, so one worker computes it. A small class makes it run on all.
"""

from __future__ import annotations

import torch
from torch import nn

import shardwise
from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators import Call, Local, Need, Request, Split, Strategy, operator


class MatrixExp(Strategy):
    """The last two dimensions are a matrix, which is needed whole."""

    keeps_inputs, draws = True, False

    def read(self, call: Call) -> Request:
        """From the arguments of the ATen call to a layer: its tensors and its attributes."""
        return Request("matrix_exp", (call["self"],))

    def axes(self, layer: Layer) -> dict[str, int]:
        return {axis: most for axis, most in super().axes(layer).items() if axis in "nfc"}

    def needs(self, split: Split) -> tuple[Need, ...]:
        shape = split.layer.shape
        matrices = [split.dim_ranges(dim) for dim in range(len(shape) - 2)]
        return (Need(Layout.of(shape, [*matrices, *map(split.whole, shape[-2:])])),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.matrix_exp(tensors[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matrix_exp(self.conv(x)) * 2


def compare() -> tuple[str, str, float]:
    """What every worker does: the plan before and after, and the largest error."""
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 3, 8, 8).double()
    before = str(shardwise.Plan.uniform(shardwise.capture(net, x), f=3))
    operator("matrix_exp", "matrix_exp")(MatrixExp)  # or @operator(...) above the class
    plan = shardwise.Plan.uniform(shardwise.capture(net, x), f=3)
    model = shardwise.parallelize(net, plan)
    error = float((model(x) - net(x)).detach().abs().max())
    return before, str(plan), error


if __name__ == "__main__":
    before, after, error = shardwise.run_local(compare, 3)[0]
    print(f"before: {before}\nafter: {after}\nlargest error {error:.1e}")
    assert error < 1e-9
