"""VGG (Simonyan and Zisserman 2014), P3's constant-width variants, and a CIFAR-10 one."""

from __future__ import annotations

from torch import Tensor, nn

from .blocks import init_convs

# A stage is (convolutions, feature maps); each stage ends in a 2x2 max pooling.
Stages = tuple[tuple[int, int], ...]

VGG11: Stages = ((1, 64), (1, 128), (2, 256), (2, 512), (2, 512))
VGG16: Stages = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
VGG19: Stages = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))


def constant_width(maps: int) -> Stages:
    """VGG-A with as many maps in every convolution, as in P3."""
    return tuple((num_convs, maps) for num_convs, _ in VGG11)


class VGG(nn.Module):
    """Stages of 3x3 convolutions and 2x2 pooling, then three fully connected layers.

    >>> import torch
    >>> VGG(VGG16)(torch.zeros(2, 3, 224, 224)).shape
    torch.Size([2, 1000])
    """

    def __init__(
        self,
        stages: Stages,
        num_classes: int = 1000,
        *,
        hidden: int = 4096,
        pooled: int = 7,
        dropout: float = 0.5,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        maps_in = 3
        for num_convs, maps in stages:
            for _ in range(num_convs):
                layers.append(nn.Conv2d(maps_in, maps, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(maps))
                layers.append(nn.ReLU(inplace=True))
                maps_in = maps
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        # The identity for images of the published size; others are brought to that size.
        self.pool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(maps_in * pooled * pooled, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)))
