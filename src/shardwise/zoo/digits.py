"""A small network for scikit-learn's 8x8 handwritten digits."""

from __future__ import annotations

from torch import nn

from .blocks import conv_bn, init_convs


def digits(num_classes: int = 10, *, width: int = 32) -> nn.Sequential:
    """Build three convolutions with batch norm, two poolings and one linear layer.

    >>> import torch
    >>> digits()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    model = nn.Sequential(
        conv_bn(1, width, 3, padding=1),
        conv_bn(width, 2 * width, 3, padding=1),
        nn.MaxPool2d(2),
        conv_bn(2 * width, 2 * width, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 2 * 2, num_classes),
    )
    init_convs(model)
    return model
