"""Pieces that several networks of the zoo are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Size = int | tuple[int, int]


def conv_bn(
    in_channels: int,
    out_channels: int,
    kernel: Size,
    stride: int = 1,
    padding: Size = 0,
    *,
    eps: float = 1e-5,
    relu: bool = True,
) -> nn.Sequential:
    """Build a convolution, its batch norm and, unless told otherwise, a ReLU.

    >>> conv_bn(3, 64, 3, padding=1)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 64, 8, 8])
    """
    # Batch norm subtracts the mean, so a bias of the convolution would do nothing.
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False)
    layers: list[nn.Module] = [conv, nn.BatchNorm2d(out_channels, eps=eps)]
    if relu:
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class Branches(nn.Module):
    """Run several branches on one input and concatenate their channels.

    >>> Branches(nn.Conv2d(3, 4, 1), nn.Identity())(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 7, 8, 8])
    """

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def init_convs(model: nn.Module) -> None:
    """Give every convolution He's normal weights and a zero bias, in place."""
    # torch's default shrinks the signal by about sqrt(6) per ReLU layer, which leaves a
    # network without batch norm, such as VGG-19, with almost no gradient to start from.
    # Linear layers keep torch's default: resampling VGG's 124M of them costs a second.
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d | nn.ConvTranspose3d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
