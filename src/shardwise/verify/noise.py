"""What a model itself makes of a change in the last bit.

Rounding in another order is such a change, in every layer. A network that keeps few digits (batch
norm over two values, or a section in float32) shows it here, on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.verify.comparison import (
    Comparison,
    Values,
    differences,
    distance,
    is_inexact,
    size,
)
from shardwise.verify.trial import Trial

MOST_DRAWS = 8
HOPELESS = 100.0  # so many times above its limit after two draws, no other draw will excuse it
JUMP = 100.0  # a layer that makes noise this much larger is where it arises


class LastBit(TorchDispatchMode):
    """Within, what a model rounds to a coarser dtype is rounded otherwise: by one last bit.

    Signs are random; in every fourth draw all go up, which sums do not average out. Whole numbers
    are left as they are: masks, counts and indices stay what they mean.
    """

    def __init__(self, draw: int) -> None:
        super().__init__()
        self._all_up = draw % 4 == 1
        self._generator = torch.Generator().manual_seed(draw)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor with the last bit of every element changed."""
        signs = torch.ones(x.shape)
        if not self._all_up:
            signs = 2.0 * torch.randint(2, x.shape, generator=self._generator) - 1.0
        epsilon = torch.finfo(x.dtype).eps
        moved = x * (1.0 + epsilon * signs.double()).to(x.device, x.real.dtype)
        return moved if x.is_complex() else torch.where(x == x.round(), x, moved)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        finest = min(map(_epsilon, pytree.tree_leaves((args, kwargs))), default=inf)
        for part in pytree.tree_leaves(y):
            if finest < _epsilon(part) < inf and not func.is_view:
                part.copy_(self.changed(part))
        return y


def _epsilon(value: Any) -> float:
    return torch.finfo(value.dtype).eps if is_inexact(value) else inf


def judge(
    model: nn.Module, trial: Trial, expected: Values, results: list[Comparison]
) -> list[Comparison]:
    """The results with the noise of every tensor, drawn until it explains them or never will."""
    for draw in range(MOST_DRAWS):
        drawn = differences(_shaken(model, trial, draw, Trial.run), expected)
        noise = {(c.kind, c.name): c.error for c in drawn}
        results = [
            replace(c, noise=max(noise.get((c.kind, c.name), inf), c.noise or 0.0)) for c in results
        ]
        unexplained = [c.severity for c in results if not c.passed and not c.fault]
        if not unexplained or (draw and max(unexplained) > HOPELESS):
            break
    origin = _origin(model, trial)
    return [replace(c, origin=origin) if c.limit > c.tolerance else c for c in results]


def _shaken(model: nn.Module, trial: Trial, draw: int, action: Callable[[Trial, Any], Any]) -> Any:
    """The outcome of an action when the last bit of inputs, weights and roundings is another."""
    last_bit, model = LastBit(draw), copy.deepcopy(model)
    with torch.no_grad():
        inputs = tuple(last_bit.changed(x) if is_inexact(x) else x for x in trial.inputs)
        for param in filter(is_inexact, model.parameters()):
            param.copy_(last_bit.changed(param))
    with last_bit:
        return action(replace(trial, inputs=inputs), model)


# -- where it arises -------------------------------------------------------------------------------


def _origin(model: nn.Module, trial: Trial) -> str:
    """The first module whose outputs are far noisier than all that came before them."""
    plain = _stations(trial, copy.deepcopy(model))
    shaken = _shaken(model, trial, 0, _stations)
    most, jumps = min(map(_epsilon, trial.inputs), default=inf), {}
    for (place, expected), (_, found) in zip(plain, shaken, strict=False):
        for a, b in zip(found, expected, strict=False):
            noise = distance(a, b) / max(size(b), 1e-300) if a.shape == b.shape else inf
            if noise > most:
                jumps.setdefault(place, noise / most)
                most = noise
    largest = max(jumps.values(), default=0.0)
    return next((place for place, jump in jumps.items() if jump >= min(JUMP, largest)), "")


def _stations(trial: Trial, model: nn.Module) -> list[tuple[str, list[torch.Tensor]]]:
    """What goes into and comes out of every module in a forward pass, in order."""
    found: list[tuple[str, list[torch.Tensor]]] = []

    def note(place: str, values: Any) -> None:
        tensors = filter(is_inexact, pytree.tree_leaves(values))
        found.append((place, [x.detach().clone() for x in tensors]))

    def watch(name: str, module: nn.Module) -> None:
        before = f"before {name!r}" if name else "at the inputs"
        after = f"in {name!r}" if name else "in the model's own forward"
        module.register_forward_pre_hook(lambda _, args: note(before, args))
        module.register_forward_hook(lambda _, args, y: note(after, y))

    for name, module in model.named_modules():
        watch(name, module)
    trial.forward(model)
    return found
