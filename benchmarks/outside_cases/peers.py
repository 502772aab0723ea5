"""What DistConv, PyTorch and PyDTNN test themselves on; the tables are those of our own tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from outside_cases.case import Case, number, seed_everything

NUM_DRAWN = 400  # convolutions drawn from PyDTNN's ranges
Made = tuple[nn.Module, tuple[int, ...]]  # a module and the shape of its input


@cache
def table() -> dict[str, Callable[[], Made]]:
    """How each case is made, by its name."""
    import test_conformance as distconv
    from test_conformance_peers import Drawn

    found: dict[str, Callable[[], Made]] = {}
    for nd in (1, 2, 3):
        shape = (2, 4, *[{1: 64, 2: 32, 3: 12}[nd]] * nd)
        for k in (1, 2, 3, 5):
            for stride in (1, 2, 4):
                for mode in ("zeros", "circular"):
                    make = partial(distconv.conv_4_to_8, nd, k, stride, padding_mode=mode)
                    found[f"distconv {nd}d k{k} s{stride} {mode}"] = partial(_made, make, shape)
    for kernel in [(3, 5), (5, 3), (1, 3), (3, 1), (3, 5, 7), (1, 3, 5), (7, 3, 1)]:
        make = partial(distconv.conv_4_to_8, len(kernel), kernel)
        found[f"distconv {kernel}"] = partial(_made, make, (1, 4, *[16] * len(kernel)))
    for name, layer in distconv.SILENTLY_WRONG.items():
        found[f"wrong {name}"] = partial(_made, lambda x=layer: x, (2, 8, 15, 13))
    for name, (layer, size) in distconv.REFUSED.items():
        found[f"refused {name}"] = partial(_made, lambda x=layer: x, (2, 4, size, size))
    found["pytorch patches"] = partial(_made, partial(nn.Conv2d, 3, 8, 4, 4), (7, 3, 64, 128))
    depthwise = partial(nn.Conv2d, 32, 32, 7, padding=3, groups=32)
    found["pytorch depthwise"] = partial(_made, depthwise, (2, 32, 32, 64))
    for seed in range(NUM_DRAWN):
        drawn = Drawn.draw(seed)
        make = partial(nn.Conv2d, drawn.shape[1], drawn.filters, drawn.kernel, **drawn.options)
        found[f"pydtnn {drawn}"] = partial(_made, make, drawn.shape)
    return found


def _made(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Made:
    return make(), shape


def groups() -> list[str]:
    return [name for name in table()]


def most(group: str) -> int:
    return 1


def cases(group: str) -> list[Case]:
    return [Case(f"peers:{group}:0", partial(_build, group))]


def _build(group: str) -> Any:
    seed_everything(number(group))
    module, shape = table()[group]()
    return module.double(), (torch.randn(shape, dtype=torch.float64),)
