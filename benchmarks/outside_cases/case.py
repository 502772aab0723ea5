"""A case: a module somebody else's test suite runs, with inputs, and how to try it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Case:
    """A named module to be built with its inputs, or a check that says what is wrong."""

    name: str  # source:group:index
    build: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]] | None = None
    training: bool = True
    num_steps: int = 1
    must_fail: bool = False  # plain torch raises
    and_eval: bool = False  # evaluate after training
    num_plans: int = 4  # half of them uniform, half random
    seconds: float = 60.0  # that it may take
    check: Callable[[int], str | None] | None = None


def number(text: str) -> int:
    """The same number for the same text in every process."""
    return zlib.crc32(text.encode())


def seed_everything(seed: int) -> None:
    """All generators that sample inputs are drawn from."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


T = Any  # a tensor, or None
MOST_INPUTS = 5


@dataclass(frozen=True)
class Place:
    """Where a tensor of a call comes from: an input, a parameter or a buffer."""

    kind: str
    index: int
    scalar: bool = False  # the input has one dimension more, for a tensor that has none


class Call(nn.Module):
    """A function of tensors as a module: some are inputs, others its parameters or buffers."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.function, self.leaves, self.spec = function, leaves, spec

    def forward(self, a: T, b: T = None, c: T = None, d: T = None, e: T = None) -> Any:
        inputs = (a, b, c, d, e)
        leaves = [self._fill(x, inputs) if isinstance(x, Place) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def _fill(self, place: Place, inputs: tuple[Any, ...]) -> torch.Tensor:
        if place.kind != "input":
            return getattr(self, f"{place.kind}{place.index}")
        x = inputs[place.index]
        return x.select(0, 0) if place.scalar else x


def as_module(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A call as a module: the first tensor is its input, a seed decides about the others."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    module, draw, inputs = Call(function, leaves, spec), random.Random(seed), []
    for position, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            continue
        x = x.detach()
        if _is_input(x, inputs, draw):
            leaves[position] = Place("input", len(inputs), scalar=x.ndim == 0)
            inputs.append(torch.stack([x, x]) if x.ndim == 0 else x)
        elif x.is_floating_point() and draw.random() < 0.7:
            leaves[position] = Place("param", position)
            module.register_parameter(f"param{position}", nn.Parameter(x.clone()))
        else:
            leaves[position] = Place("buffer", position)
            module.register_buffer(f"buffer{position}", x.clone())
    return module, tuple(inputs) or (torch.ones(2, 3),)


def _is_input(x: torch.Tensor, inputs: list[torch.Tensor], draw: random.Random) -> bool:
    if not inputs:
        return True
    if len(inputs) == MOST_INPUTS:
        return False
    same = x.ndim > 0 and x.shape[0] == inputs[0].shape[0]
    return draw.random() < (0.5 if same else 0.05 if x.ndim else 0.0)
