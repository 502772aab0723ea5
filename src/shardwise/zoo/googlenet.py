"""GoogLeNet (Szegedy et al. 2015) with batch norm, and a CIFAR-10 one."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from .blocks import Branches, conv_bn, init_convs

conv = partial(conv_bn, eps=1e-3)

# The paper's Table 1: channels in, then maps of the 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5
# and pool projection.
MODULES = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


def inception(
    in_channels: int, n1: int, reduce3: int, n3: int, reduce5: int, n5: int, pool: int
) -> Branches:
    """Build one Inception module of four branches."""
    return Branches(
        conv(in_channels, n1, 1),
        nn.Sequential(conv(in_channels, reduce3, 1), conv(reduce3, n3, 3, padding=1)),
        # The "5x5" branch is 3x3 in the TensorFlow and torchvision networks, whose parameter
        # counts everybody quotes; we keep to them.
        nn.Sequential(conv(in_channels, reduce5, 1), conv(reduce5, n5, 3, padding=1)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(in_channels, pool, 1)),
    )


def stage(*layers: str) -> nn.Sequential:
    """Build Inception modules by name; "pool3" is a halving max pooling over 3x3."""
    built: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in layers:
        if layer in MODULES:
            built[f"inception{layer}"] = inception(*MODULES[layer])
        else:
            built[layer] = nn.MaxPool2d(int(layer[-1]), 2, ceil_mode=True)
    return nn.Sequential(built)


def auxiliary(in_channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    """Build a classifier that feeds gradients into the middle of the network."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        conv(in_channels, 128, 1),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(1024, num_classes),
    )


class GoogLeNet(nn.Module):
    """Nine Inception modules; 13.0M parameters with both auxiliary heads, 6.6M without.

    In training mode with `aux` it returns (logits, logits after 4a, logits after 4d),
    otherwise logits alone.

    >>> [y.shape for y in GoogLeNet()(torch.zeros(2, 3, 224, 224))]
    [torch.Size([2, 1000]), torch.Size([2, 1000]), torch.Size([2, 1000])]
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        aux: bool = True,
        dropout: float = 0.2,
        aux_dropout: float = 0.7,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        if small_images:
            self.stem = conv(3, 192, 3, padding=1)
        else:
            self.stem = nn.Sequential(
                conv(3, 64, 7, 2, padding=3),
                nn.MaxPool2d(3, 2, ceil_mode=True),
                conv(64, 64, 1),
                conv(64, 192, 3, padding=1),
                nn.MaxPool2d(3, 2, ceil_mode=True),
            )
        self.front = stage("3a", "3b", "pool3", "4a")
        self.middle = stage("4b", "4c", "4d")
        self.back = stage("4e", "pool2", "5a", "5b")
        self.aux1 = auxiliary(512, num_classes, aux_dropout) if aux else None
        self.aux2 = auxiliary(528, num_classes, aux_dropout) if aux else None
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(1024, num_classes)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        front = self.front(self.stem(x))
        middle = self.middle(front)
        x = self.pool(self.back(middle))
        logits = self.classifier(self.dropout(torch.flatten(x, 1)))
        if self.training and self.aux1 is not None and self.aux2 is not None:
            return logits, self.aux1(front), self.aux2(middle)
        return logits
