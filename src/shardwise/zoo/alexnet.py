"""AlexNet in one tower (Krizhevsky 2014), and P5's variant with batch norm."""

from __future__ import annotations

from torch import Tensor, nn

from .blocks import init_convs


class AlexNet(nn.Module):
    """Five convolutions and three fully connected layers, 61.1M parameters.

    `batch_norm` puts batch norm where the network of 2012 had its two local response norms:
    after the ReLU of the first and of the second convolution.

    >>> import torch
    >>> AlexNet()(torch.zeros(2, 3, 224, 224)).shape
    torch.Size([2, 1000])
    """

    def __init__(
        self, num_classes: int = 1000, *, dropout: float = 0.5, batch_norm: bool = False
    ) -> None:
        super().__init__()

        def conv(
            in_channels: int, out_channels: int, kernel: int, stride: int, padding: int
        ) -> tuple[nn.Module, ...]:
            layer = nn.Conv2d(in_channels, out_channels, kernel, stride, padding)
            return layer, nn.ReLU(inplace=True)

        def norm(channels: int) -> tuple[nn.Module, ...]:
            return (nn.BatchNorm2d(channels),) if batch_norm else ()

        self.features = nn.Sequential(
            *conv(3, 64, 11, 4, 2),
            *norm(64),
            nn.MaxPool2d(3, 2),
            *conv(64, 192, 5, 1, 2),
            *norm(192),
            nn.MaxPool2d(3, 2),
            *conv(192, 384, 3, 1, 1),
            *conv(384, 256, 3, 1, 1),
            *conv(256, 256, 3, 1, 1),
            nn.MaxPool2d(3, 2),
        )
        # Already 6x6 for 224x224 images; others are brought to it, so that fc1 fits any image.
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)))
