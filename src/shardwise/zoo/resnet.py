"""ResNet (He et al. 2016), Wide ResNet (Zagoruyko and Komodakis 2016), and a CIFAR-10 one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .blocks import conv_bn, init_convs

# A body maps (channels in, base channels, width factor, stride) to (layers, channels out).
Body = Callable[[int, int, int, int], tuple[nn.Sequential, int]]


def basic(in_channels: int, base: int, width: int, stride: int) -> tuple[nn.Sequential, int]:
    """Build ResNet-34's two 3x3 convolutions."""
    inner = base * width
    body = nn.Sequential(
        conv_bn(in_channels, inner, 3, stride, padding=1),
        conv_bn(inner, inner, 3, padding=1, relu=False),
    )
    return body, inner


def bottleneck(in_channels: int, base: int, width: int, stride: int) -> tuple[nn.Sequential, int]:
    """Build ResNet-50's 1x1, 3x3, 1x1 convolutions; `width` widens only the inside."""
    inner, out_channels = base * width, base * 4
    body = nn.Sequential(
        conv_bn(in_channels, inner, 1),
        # The stride sits on the 3x3, as in Goyal et al. 2017, whose recipe P2 follows.
        conv_bn(inner, inner, 3, stride, padding=1),
        conv_bn(inner, out_channels, 1, relu=False),
    )
    return body, out_channels


class Residual(nn.Module):
    """Add a body's output to its input, projected by a 1x1 convolution where shapes differ."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, global average pooling and one linear layer.

    `small_images` replaces the stem's strided 7x7 convolution and pooling, which would shrink
    a 32x32 image to 8x8 at once, by one 3x3 convolution.

    >>> ResNet(bottleneck, (3, 4, 6, 3))(torch.zeros(2, 3, 224, 224)).shape
    torch.Size([2, 1000])
    """

    def __init__(
        self,
        body: Body,
        depths: tuple[int, ...],
        num_classes: int = 1000,
        *,
        width: int = 1,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        if small_images:
            self.stem = conv_bn(3, 64, 3, padding=1)
        else:
            self.stem = nn.Sequential(conv_bn(3, 64, 7, 2, padding=3), nn.MaxPool2d(3, 2, 1))
        stages = []
        channels = 64
        for level, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                stride = 2 if level > 0 and block == 0 else 1
                layers, out_channels = body(channels, 64 * 2**level, width, stride)
                same = stride == 1 and channels == out_channels
                shortcut = (
                    nn.Identity()
                    if same
                    else conv_bn(channels, out_channels, 1, stride, relu=False)
                )
                blocks.append(Residual(layers, shortcut))
                channels = out_channels
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stages(self.stem(x)))
        return self.classifier(torch.flatten(x, 1))
