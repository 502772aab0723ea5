"""The list of all networks: how to build each, and for which input."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .alexnet import alexnet, alexnet_bn
from .densenet import densenet121, densenet121_cifar
from .digits import digits
from .googlenet import googlenet, googlenet_cifar
from .inception import inception_v3
from .resnet import resnet34, resnet34_cifar, resnet50, wrn50_2, wrn50_4
from .unet import unet3d
from .vgg import vgg11, vgg16, vgg16_cifar, vgg19, vgg128, vgg256, vgg512


@dataclass(frozen=True)
class Entry:
    """A network: its name, its builder, one input's shape, its classes, and who uses it."""

    name: str
    factory: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    num_classes: int
    source: str

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"

    def build(self, num_classes: int | None = None, **options: Any) -> nn.Module:
        """Build the network with fresh random weights."""
        classes = self.num_classes if num_classes is None else num_classes
        return self.factory(num_classes=classes, **options)


_IMAGENET = (3, 224, 224), 1000
_CIFAR = (3, 32, 32), 10

_ENTRIES = (
    Entry("alexnet", alexnet, *_IMAGENET, "P4"),
    Entry("alexnet_bn", alexnet_bn, *_IMAGENET, "P5"),
    Entry("vgg11", vgg11, *_IMAGENET, "P3"),
    Entry("vgg16", vgg16, *_IMAGENET, "P1, P4, P5"),
    Entry("vgg19", vgg19, *_IMAGENET, "P5"),
    Entry("vgg128", vgg128, *_IMAGENET, "P3"),
    Entry("vgg256", vgg256, *_IMAGENET, "P3"),
    Entry("vgg512", vgg512, *_IMAGENET, "P3"),
    Entry("resnet34", resnet34, *_IMAGENET, "P1"),
    Entry("resnet50", resnet50, *_IMAGENET, "P2, P5"),
    Entry("wrn50_2", wrn50_2, *_IMAGENET, "P2"),
    Entry("wrn50_4", wrn50_4, *_IMAGENET, "P2"),
    Entry("googlenet", googlenet, *_IMAGENET, "P1, P5"),
    Entry("inception_v3", inception_v3, (3, 299, 299), 1000, "P4"),
    Entry("densenet121", densenet121, *_IMAGENET, "P1"),
    Entry("vgg16_cifar", vgg16_cifar, *_CIFAR, "P1"),
    Entry("resnet34_cifar", resnet34_cifar, *_CIFAR, "P1"),
    Entry("densenet121_cifar", densenet121_cifar, *_CIFAR, "P1"),
    Entry("googlenet_cifar", googlenet_cifar, *_CIFAR, "P1"),
    Entry("digits", digits, (1, 8, 8), 10, "scikit-learn's digits"),
    Entry("unet3d", unet3d, (1, 32, 32, 32), 3, "Cicek et al. 2016"),
)

MODELS: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}

# Other names in use: P3 says VGG-A, torchvision spells Wide ResNet out.
ALIASES = {"vgg_a": "vgg11", "wide_resnet50_2": "wrn50_2", "wide_resnet50_4": "wrn50_4"}


def names() -> tuple[str, ...]:
    """Return the name of every network."""
    return tuple(MODELS)


def entry(name: str) -> Entry:
    """Look a network up by its name or one of its aliases.

    >>> entry("vgg_a").name
    'vgg11'
    """
    known = ALIASES.get(name, name)
    if known not in MODELS:
        close = difflib.get_close_matches(name.lower(), [*MODELS, *ALIASES], n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(MODELS)}."
        raise ValueError(f"the zoo has no network {name!r}; {hint}")
    return MODELS[known]


def build(name: str, **options: Any) -> nn.Module:
    """Build a network by name.

    >>> build("resnet50", num_classes=10).classifier
    Linear(in_features=2048, out_features=10, bias=True)
    """
    return entry(name).build(**options)


def input_shape(name: str, batch: int) -> tuple[int, ...]:
    """Return the shape of a batch of a network's inputs.

    >>> input_shape("resnet50", 32)
    (32, 3, 224, 224)
    """
    return (batch, *entry(name).input_shape)
