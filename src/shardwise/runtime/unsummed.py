"""Gradients that wait for their sum: what backward passes under `no_sync()` leave in `.grad`.

A rank's part of a gradient means nothing to anybody else, so it is kept beside `.grad`, which tells
whoever reads it what is missing. What autograd itself adds to `.grad` (a penalty of weights, say)
is whole on every rank, and stays apart from that part.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.runtime.block import Block, plain

Params = Mapping[str, torch.Tensor]
_GRAD: Any = torch.Tensor.grad  # what blocks make of it is not for what waits

SCALING = frozenset(("mul_", "div_", "multiply_", "divide_", "true_divide_"))
SCALING_SIGNS = frozenset(("__imul__", "__idiv__", "__itruediv__"))
HARMLESS = frozenset(("detach_", "requires_grad_", "size", "dim", "is_floating_point"))


class Unsummed(Block):
    """A gradient without the part that this rank has of its sum, which has not been made yet.

    It is a kind of block so that it, and not a block beside it, answers where both are given.
    """

    _name: str
    _part: torch.Tensor
    _begun: int  # version of the memory when nobody had added anything

    def as_subclass(self, cls: Any) -> Any:
        """The same: a parameter that is a block would make a block of its gradient."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name == "_foreach_zero_":
                for each in args[0]:
                    each.zero_()
                    if isinstance(each, Unsummed):
                        each._part.zero_()
                return None
            own = args[0]
            if name == "zero_" or _scales(name, args):
                func(own._part, *args[1:], **kwargs)
            elif name not in HARMLESS:
                if name == "__get__" and not isinstance(found := func(*args), torch.Tensor):
                    return found
                raise refusal(_names(args))
            return func(*args, **kwargs)


def _scales(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function only multiplies by a number: then parts may be multiplied by it."""
    known = name in SCALING or name in SCALING_SIGNS
    return known and len(args) == 2 and isinstance(args[1], Number)


def _names(values: Any) -> list[str]:
    found = []
    for value in values:
        if isinstance(value, Unsummed):
            found.append(value._name)
        elif isinstance(value, (list, tuple)):
            found += _names(value)
    return found


def refusal(names: list[str]) -> ShardwiseError:
    return ShardwiseError(
        f"the gradient of {names[0] if names else 'a parameter'!r} has not been summed over ranks: "
        "its last backward pass ran under no_sync(); run one outside before anything reads it"
    )


def unsummed(params: Params) -> dict[str, Unsummed]:
    """The gradients that wait for their sum."""
    found = ((name, _GRAD.__get__(param)) for name, param in params.items())
    return {name: gradient for name, gradient in found if type(gradient) is Unsummed}


def hold(name: str, param: torch.Tensor, part: torch.Tensor) -> None:
    """Keeps this rank's part of a gradient until the sum is made."""
    before = _GRAD.__get__(param)
    if type(before) is Unsummed:
        before._part.add_(part)
        return
    summed = torch.zeros_like(part) if before is None else plain(before)
    made: Any = summed.as_subclass(Unsummed)
    made._name, made._part = name, part
    made._begun = -1 if before is not None else summed._version
    _GRAD.__set__(param, made)


def release(param: torch.Tensor) -> None:
    """Leaves in `.grad` what is whole: the sum of the parts is about to be added to it."""
    waiting = _GRAD.__get__(param)
    untouched = waiting._version == waiting._begun
    _GRAD.__set__(param, None if untouched else plain(waiting))
