"""Inception-v3 (Szegedy et al. 2016)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Branches, Size, conv_bn, init_convs

conv = partial(conv_bn, eps=1e-3)


def chain(in_channels: int, *layers: tuple[int, Size]) -> nn.Sequential:
    """Build stride-1 convolutions that keep the image size, each given as (maps, kernel)."""
    built = []
    for maps, kernel in layers:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        built.append(conv(in_channels, maps, kernel, padding=padding))
        in_channels = maps
    return nn.Sequential(*built)


def pooled(in_channels: int, maps: int) -> nn.Sequential:
    """Build the branch that averages over 3x3 and projects to `maps` channels."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(in_channels, maps, 1))


def module_a(c: int, pool_maps: int) -> Branches:
    """Build a module of the 35x35 grid (the paper's Figure 5)."""
    return Branches(
        chain(c, (64, 1)),
        chain(c, (48, 1), (64, 5)),
        chain(c, (64, 1), (96, 3), (96, 3)),
        pooled(c, pool_maps),
    )


def reduce_b(c: int) -> Branches:
    """Build the step from the 35x35 to the 17x17 grid (Figure 10)."""
    return Branches(
        conv(c, 384, 3, 2),
        nn.Sequential(chain(c, (64, 1), (96, 3)), conv(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def module_c(c: int, n: int) -> Branches:
    """Build a module of the 17x17 grid, its 7x7 kernels split into 1x7 and 7x1 (Figure 6)."""
    return Branches(
        chain(c, (192, 1)),
        chain(c, (n, 1), (n, (1, 7)), (192, (7, 1))),
        chain(c, (n, 1), (n, (7, 1)), (n, (1, 7)), (n, (7, 1)), (192, (1, 7))),
        pooled(c, 192),
    )


def reduce_d(c: int) -> Branches:
    """Build the step from the 17x17 to the 8x8 grid."""
    return Branches(
        nn.Sequential(chain(c, (192, 1)), conv(192, 320, 3, 2)),
        nn.Sequential(chain(c, (192, 1), (192, (1, 7)), (192, (7, 1))), conv(192, 192, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def module_e(c: int) -> Branches:
    """Build a module of the 8x8 grid, whose 3x3 kernels fan out into 1x3 and 3x1 (Figure 7)."""

    def fan() -> Branches:
        return Branches(chain(384, (384, (1, 3))), chain(384, (384, (3, 1))))

    return Branches(
        chain(c, (320, 1)),
        nn.Sequential(chain(c, (384, 1)), fan()),
        nn.Sequential(chain(c, (448, 1), (384, 3)), fan()),
        pooled(c, 192),
    )


class Auxiliary(nn.Module):
    """Classify from the 17x17 grid, to feed gradients into the middle of the network."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(conv(in_channels, 128, 1), conv(128, 768, 5))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # The published window brings 17x17 to the 5x5 the convolution needs. A grid below
        # 17x17, from an image below 299x299, would come out too small.
        published = min(x.shape[-2:]) >= 17
        x = F.avg_pool2d(x, 5, 3) if published else F.adaptive_avg_pool2d(x, 5)
        return self.classifier(torch.flatten(self.pool(self.convs(x)), 1))


class InceptionV3(nn.Module):
    """Eleven modules on three grids; 27.2M parameters with the auxiliary head, 23.8M without.

    In training mode with `aux` it returns (logits, auxiliary logits), otherwise logits alone.

    >>> InceptionV3().eval()(torch.zeros(2, 3, 299, 299)).shape
    torch.Size([2, 1000])
    """

    def __init__(self, num_classes: int = 1000, *, aux: bool = True, dropout: float = 0.5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv(3, 32, 3, 2),
            conv(32, 32, 3),
            conv(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            conv(64, 80, 1),
            conv(80, 192, 3),
            nn.MaxPool2d(3, 2),
        )
        self.grid35 = nn.Sequential(module_a(192, 32), module_a(256, 64), module_a(288, 64))
        self.grid17 = nn.Sequential(
            reduce_b(288), *(module_c(768, n) for n in (128, 160, 160, 192))
        )
        self.grid8 = nn.Sequential(reduce_d(768), module_e(1280), module_e(2048))
        self.aux = Auxiliary(768, num_classes) if aux else None
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2048, num_classes)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        middle = self.grid17(self.grid35(self.stem(x)))
        x = self.pool(self.grid8(middle))
        logits = self.classifier(torch.flatten(self.dropout(x), 1))
        if self.training and self.aux is not None:
            return logits, self.aux(middle)
        return logits
