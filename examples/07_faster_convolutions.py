"""The fastest convolution kernels of this machine, found by timing, in a model of yours.

    python examples/07_faster_convolutions.py

Without a C++ compiler when the package was installed, the stock operators are all there is.
"""

from __future__ import annotations

import torch
from torch import nn

import shardwise


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
    )
    x = torch.randn(8, 3, 16, 16)
    twin = shardwise.accelerate(model, x, exact_kernels=True)
    assert twin.state_dict().keys() == model.state_dict().keys()
    for name, module in twin.named_modules():
        if hasattr(module, "choice"):
            print(f"layer {name}: {module.choice}")
    error = float((twin(x) - model(x)).detach().abs().max())
    print(f"outputs differ by at most {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
