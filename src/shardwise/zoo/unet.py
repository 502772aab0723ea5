"""A 3-D U-Net (Cicek et al. 2016) for segmenting volumes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .blocks import init_convs


def double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    """Build two 3x3x3 convolutions, each with batch norm and a ReLU."""
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [
            nn.Conv3d(channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm3d(out_channels),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class Up(nn.Module):
    """Double the volume's size, append the skip connection's channels, and convolve."""

    def __init__(self, in_channels: int, skip_channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(in_channels, skip_channels, 2, stride=2)
        self.convs = double_conv(2 * skip_channels, skip_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convs(torch.cat([skip, self.up(x)], dim=1))


class UNet3d(nn.Module):
    """Contract through `channels`, expand back, and label every voxel.

    Convolutions are padded, unlike the paper's, so that the labels cover the whole volume.

    >>> UNet3d()(torch.zeros(1, 1, 32, 32, 32)).shape
    torch.Size([1, 3, 32, 32, 32])
    """

    def __init__(
        self,
        num_classes: int = 3,
        *,
        in_channels: int = 1,
        channels: Sequence[int] = (16, 32, 64, 128),
    ) -> None:
        super().__init__()
        inputs = (in_channels, *channels)
        self.down = nn.ModuleList(map(double_conv, inputs, channels))
        self.pool = nn.MaxPool3d(2)
        self.up = nn.ModuleList(map(Up, channels[:0:-1], channels[-2::-1]))
        self.head = nn.Conv3d(channels[0], num_classes, 1)
        self.multiple = 2 ** (len(channels) - 1)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        if any(size % self.multiple for size in x.shape[2:]):
            raise ValueError(
                f"volume {tuple(x.shape[2:])} does not halve {len(self.up)} times: "
                f"depth, height and width must be multiples of {self.multiple}"
            )
        skips: list[Tensor] = []
        for level, convs in enumerate(self.down):
            x = convs(self.pool(x) if level else x)
            skips.append(x)
        for up, skip in zip(self.up, skips[-2::-1], strict=True):
            x = up(x, skip)
        return self.head(x)
