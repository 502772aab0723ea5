"""Convolutions of known networks, written as oneDNN's benchdnn writes them; split, and as kernels.

A name such as g32ic64oc64ih56kh3sh2ph1dh1 has a letter pair and a number for each size: g groups,
ic and oc channels, i/k/s/p/d with d, h or w the size, kernel, stride, padding and dilation (0 is
none) of depth, height and width. What is missing follows: width as height, height as depth.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from outside_cases.case import Case, number, seed_everything

NAMES = """
resnet50: ic3oc64ih224kh7sh2ph3 ic64oc64ih56kh1 ic64oc64ih56kh3ph1 ic64oc256ih56kh1
resnet50: ic256oc512ih56kh1sh2 ic128oc128ih56kh3sh2ph1 ic512oc128ih28kh1 ic256oc256ih28kh3sh2ph1
resnet50: ic512oc512ih7kh3ph1 ic2048oc512ih7kh1
resnext: g32ic128oc128ih56kh3ph1 g32ic256oc256ih56kh3sh2ph1 g32ic1024oc1024ih7kh3ph1
mobilenet: ic3oc32ih224kh3sh2ph1 g32ic32oc32ih112kh3ph1 g96ic96oc96ih112kh3sh2ph1
mobilenet: g144ic144oc144ih56kh3sh2ph1 ic16oc96ih112kh1 g576ic576oc576ih14kh3sh2ph1 ic960oc320ih7kh1
efficientnet: g240ic240oc240ih28kh5sh2ph2 g672ic672oc672ih14kh5ph2 g1152ic1152oc1152ih7kh3ph1
densenet: ic64oc128ih56kh1 ic128oc32ih56kh3ph1 ic256oc128ih28kh1 ic1024oc512ih14kh1
googlenet: ic192oc16ih28kh1 ic16oc32ih28kh5ph2 ic96oc128ih28kh3ph1 ic832oc384ih7kh1
inception_v3: ic3oc32ih299kh3sh2 ic48oc64ih35kh5ph2 ic128oc128ih17kh1kw7ph0pw3
inception_v3: ic128oc192ih17kh7kw1ph3pw0 ic288oc384ih35kh3sh2 ic448oc384ih8kh1kw3ph0pw1
alexnet: ic3oc64ih227kh11sh4 g2ic96oc256ih27kh5ph2 ic256oc384ih13kh3ph1
vgg: ic3oc64ih224kh3ph1 ic512oc512ih14kh3ph1
yolo: ic32oc64ih416kh3sh2ph1 ic1024oc125ih13kh1 ic256oc512ih26kh3ph1
ssd: ic512oc1024ih19kh3ph6dh5 ic256oc486ih3kh3ph1 ic128oc256ih5kh3
deeplab: ic2048oc256ih33kh3ph12dh11 ic512oc512ih33kh3ph2dh1 ic2048oc256ih33kh3ph18dh17
wavenet: ic32oc64ih1iw64kh1kw2ph0pw0dh0dw7 ic16oc16ih1iw40kh1kw3ph0pw4dh0dw3
deepspeech: ic1oc32ih161iw76kh20kw5sh8sw2 ic32oc32ih18iw36kh10kw5sh2sw2
convnext: g96ic96oc96ih56kh7ph3 ic3oc96ih224kh4sh4 ic96oc192ih56kh2sh2
vnet: ic1oc16id16kh5ph2kd5pd2 ic16oc32id16kd2sd2 ic32oc32id8kd5pd2
i3d: ic3oc64id16ih56kd7sd2pd3 ic192oc96id8ih14kd1 ic16oc48id4ih7kd3pd1
r2plus1d: ic3oc45id8ih28kd1kh7sd1sh2pd0ph3 ic45oc64id8ih14kd3kh1pd1ph0 ic64oc144id4ih14kd1kh3pd0ph1
medical3d: ic32oc32id20ih16iw12kd3pd1 g8ic16oc16id9ih11iw13kd3sd2pd1 ic4oc8id12kd3pd2dd1
odd: ic17oc19ih23iw31kh3ph1 ic5oc7ih13iw9kh4sh3ph2 ic6oc10ih11iw17kh2kw3sh3sw1ph1pw0
odd: g3ic9oc12ih15iw10kh3sh2sw3ph2pw1dh1dw0 ic1oc1ih7kh7 ic3oc5ih9kh5sh5 ic8oc8ih5kh3sh4ph1
odd: ic4oc4ih6kh1sh2 ic7oc3ih8iw5kh5kw2ph4pw1dh1dw2 ic2oc33ih19kh3sh2 ic65oc2ih4kh3ph1
"""

LIMITS = {"channels": 24, "space": 28, "depth": 12}  # sizes are cut down to these


@dataclass(frozen=True)
class Conv:
    """One convolution; spatial attributes have one number per dimension."""

    groups: int
    channels: int
    filters: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Conv:
        """Reads benchdnn's notation.

        >>> Conv.parse("ic3oc64ih224kh7sh2ph3").kernel
        (7, 7)
        """
        given = {key: int(value) for key, value in re.findall(r"([a-z]+)(\d+)", text)}
        dims = "dhw" if any(key in given for key in ("id", "kd")) else "hw"

        def each(letter: str, default: int) -> tuple[int, ...]:
            values: list[int] = []
            for dim in dims:
                values.append(given.get(letter + dim, values[-1] if values else default))
            return tuple(values)

        return cls(
            given.get("g", 1),
            given["ic"],
            given["oc"],
            each("i", 1),
            each("k", 1),
            each("s", 1),
            each("p", 0),
            tuple(d + 1 for d in each("d", 0)),
        )

    def small(self) -> Conv:
        """The same with fewer channels and pixels, so that it takes milliseconds."""
        per_group = max(1, min(self.channels // self.groups, LIMITS["channels"] // self.groups))
        groups = min(self.groups, LIMITS["channels"] // per_group)
        filters = max(1, min(self.filters // self.groups, LIMITS["channels"] // groups))
        limit = LIMITS["depth"] if len(self.size) == 3 else LIMITS["space"]
        least = [
            d * (k - 1) + 1 - 2 * p
            for d, k, p in zip(self.dilation, self.kernel, self.padding, strict=True)
        ]
        size = tuple(max(min(n, limit), m) for n, m in zip(self.size, least, strict=True))
        parts = self.kernel, self.stride, self.padding, self.dilation
        return Conv(groups, groups * per_group, groups * filters, size, *parts)

    def module(self) -> nn.Module:
        kind = nn.Conv3d if len(self.size) == 3 else nn.Conv2d
        places = self.channels, self.filters, self.kernel, self.stride, self.padding, self.dilation
        return kind(*places, self.groups)


def table() -> dict[str, Conv]:
    """All convolutions by their names, e.g. resnet50/ic64oc64ih56kh3ph1."""
    found = {}
    for line in NAMES.strip().splitlines():
        network, names = line.split(": ")
        found |= {f"{network}/{name}": Conv.parse(name) for name in names.split()}
    return found


def groups() -> list[str]:
    return [f"{name}:{kind}" for name in table() for kind in ("float32", "float64", "kernels")]


def most(group: str) -> int:
    return 4


def cases(group: str) -> list[Case]:
    name, kind = group.split(":")
    conv = table()[name].small()
    if kind == "kernels":
        if len(conv.size) == 3:
            return []
        return [Case(f"convolutions:{group}:0", check=partial(_check_kernels, conv))]
    return [
        Case(f"convolutions:{group}:{batch}", partial(_build, conv, batch, getattr(torch, kind)))
        for batch in (1, 2, 3)
    ]


def _build(conv: Conv, batch: int, dtype: torch.dtype) -> Any:
    seed_everything(number(str(conv)) + batch)
    module = conv.module().to(dtype)
    return module, (torch.randn(batch, conv.channels, *conv.size, dtype=dtype),)


def _check_kernels(conv: Conv, seed: int) -> str | None:
    """What differs first when our own kernels compute it, of those that take the shape."""
    from convolutions import CASES, worst_excess
    from shardwise.kernels.conv_shape import ConvShape
    from shardwise.kernels.native import library

    lib, draw = library(), random.Random(seed)
    if lib is None:
        return None
    for kernel, direction in CASES:
        shape = ConvShape(
            (draw.randint(1, 3), conv.channels, *conv.size),  # type: ignore[arg-type]
            (conv.filters, conv.channels // conv.groups, *conv.kernel),  # type: ignore[arg-type]
            conv.stride,  # type: ignore[arg-type]
            conv.padding,  # type: ignore[arg-type]
            conv.dilation,  # type: ignore[arg-type]
            conv.groups,
            draw.random() < 0.5,
            draw.random() < 0.5,
        )
        threads = draw.randint(1, 3)
        if lib.workspace(kernel, direction, False, shape.problem(threads)) >= 0:
            excess = worst_excess(lib, kernel, direction, shape, threads)
            if not excess <= 1:
                return f"{kernel} {direction}, {threads} threads, {shape}: error {excess:.3g}"
    return None
