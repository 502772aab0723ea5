"""The list of all networks: how to build each, and for which input."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .alexnet import AlexNet
from .densenet import DenseNet
from .digits import digits
from .googlenet import GoogLeNet
from .inception import InceptionV3
from .resnet import ResNet, basic, bottleneck
from .unet import UNet3d
from .vgg import VGG, VGG11, VGG16, VGG19, constant_width


@dataclass(frozen=True)
class Entry:
    """A network: its name, what builds it and with what, an input's shape, classes, who uses it."""

    name: str
    factory: Callable[..., nn.Module]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    input_shape: tuple[int, ...]
    num_classes: int
    source: str

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"

    def build(self, num_classes: int | None = None, **options: Any) -> nn.Module:
        """Build the network with fresh random weights."""
        classes = self.num_classes if num_classes is None else num_classes
        return self.factory(*self.arguments, num_classes=classes, **{**self.options, **options})


_IMAGENET = (3, 224, 224), 1000
_CIFAR = (3, 32, 32), 10
_SMALL = {"small_images": True}  # a 3x3 stem without stride or pooling
_RESNET, _DENSENET = (3, 4, 6, 3), (6, 12, 24, 16)  # blocks of each stage

_ENTRIES = (
    Entry("alexnet", AlexNet, (), {}, *_IMAGENET, "P4"),
    Entry("alexnet_bn", AlexNet, (), {"batch_norm": True}, *_IMAGENET, "P5"),
    # VGG: 132.9M, 138.4M and 143.7M parameters; VGG-A with as many maps in every convolution: 48M,
    # 76M and 140M.
    Entry("vgg11", VGG, (VGG11,), {}, *_IMAGENET, "P3"),
    Entry("vgg16", VGG, (VGG16,), {}, *_IMAGENET, "P1, P4, P5"),
    Entry("vgg19", VGG, (VGG19,), {}, *_IMAGENET, "P5"),
    Entry("vgg128", VGG, (constant_width(128),), {}, *_IMAGENET, "P3"),
    Entry("vgg256", VGG, (constant_width(256),), {}, *_IMAGENET, "P3"),
    Entry("vgg512", VGG, (constant_width(512),), {}, *_IMAGENET, "P3"),
    # 21.8M and 25.6M parameters; with 3x3 convolutions twice and four times as wide 68.9M and
    # 223.4M.
    Entry("resnet34", ResNet, (basic, _RESNET), {}, *_IMAGENET, "P1"),
    Entry("resnet50", ResNet, (bottleneck, _RESNET), {}, *_IMAGENET, "P2, P5"),
    Entry("wrn50_2", ResNet, (bottleneck, _RESNET), {"width": 2}, *_IMAGENET, "P2"),
    Entry("wrn50_4", ResNet, (bottleneck, _RESNET), {"width": 4}, *_IMAGENET, "P2"),
    Entry("googlenet", GoogLeNet, (), {}, *_IMAGENET, "P1, P5"),
    # 75x75 is the smallest image that leaves a pixel.
    Entry("inception_v3", InceptionV3, (), {}, (3, 299, 299), 1000, "P4"),
    # 8.0M parameters; the published ImageNet network has no dropout.
    Entry("densenet121", DenseNet, (_DENSENET,), {}, *_IMAGENET, "P1"),
    # Five poolings leave 1x1 of a 32x32 image; fully connected layers are 512 wide.
    Entry("vgg16_cifar", VGG, (VGG16,), {"hidden": 512, "pooled": 1}, *_CIFAR, "P1"),
    Entry("resnet34_cifar", ResNet, (basic, _RESNET), _SMALL, *_CIFAR, "P1"),
    Entry("densenet121_cifar", DenseNet, (_DENSENET,), _SMALL, *_CIFAR, "P1"),
    Entry("googlenet_cifar", GoogLeNet, (), {**_SMALL, "aux": False}, *_CIFAR, "P1"),
    Entry("digits", digits, (), {}, (1, 8, 8), 10, "scikit-learn's digits"),
    # 1.4M parameters.
    Entry("unet3d", UNet3d, (), {}, (1, 32, 32, 32), 3, "Cicek et al. 2016"),
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
