"""DenseNet (Huang et al. 2017), and a CIFAR-10 one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .blocks import conv_bn, init_convs


def bn_relu_conv(in_channels: int, out_channels: int, kernel: int) -> list[nn.Module]:
    """Build batch norm, ReLU and a convolution that keeps the image size."""
    return [
        nn.BatchNorm2d(in_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False),
    ]


class DenseLayer(nn.Module):
    """Append `growth` new channels to the input.

    >>> DenseLayer(64, growth=32)(torch.zeros(2, 64, 8, 8)).shape
    torch.Size([2, 96, 8, 8])
    """

    def __init__(self, in_channels: int, *, growth: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.new = nn.Sequential(
            *bn_relu_conv(in_channels, 4 * growth, 1),
            *bn_relu_conv(4 * growth, growth, 3),
            *([nn.Dropout(dropout)] if dropout > 0 else []),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new(x)], dim=1)


class DenseNet(nn.Module):
    """A stem, dense blocks with halving transitions between them, and one linear layer.

    `small_images` replaces the stem's strided 7x7 convolution and pooling by one 3x3
    convolution.

    >>> DenseNet((6, 12, 24, 16))(torch.zeros(2, 3, 224, 224)).shape
    torch.Size([2, 1000])
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        num_classes: int = 1000,
        *,
        growth: int = 32,
        dropout: float = 0.0,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        channels = 2 * growth
        if small_images:
            # No batch norm here: the first dense layer begins with one.
            self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        else:
            self.stem = nn.Sequential(conv_bn(3, channels, 7, 2, padding=3), nn.MaxPool2d(3, 2, 1))
        layers: list[nn.Module] = []
        for level, depth in enumerate(depths):
            if level > 0:
                layers += [*bn_relu_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth=growth, dropout=dropout))
                channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.features(self.stem(x)))
        return self.classifier(torch.flatten(x, 1))
