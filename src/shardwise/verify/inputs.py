"""Example inputs: random numbers of a shape and a kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.errors import ShardwiseError
from shardwise.plans.plan import FLOAT  # here, the dtype that the model is verified in

WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")


def parse_input(text: str) -> tuple[str, str]:
    """What is said of an input's shape, and its kind, with a bound for whole numbers.

    >>> parse_input("2x3x224x224"), parse_input("2x16:int64:1000")
    (('2x3x224x224', 'float'), ('2x16', 'int64:1000'))
    """
    shape, _, kind = text.partition(":")
    dtype, _, bound = kind.partition(":")
    known = dtype in ("", FLOAT, *WHOLE, *COMPLEX)
    if not known or (bound and not (dtype in WHOLE and bound.isdigit() and int(bound))):
        raise ShardwiseError(
            f"input {text!r}: {kind!r} must be {', '.join((FLOAT, *WHOLE, *COMPLEX))}, and of "
            "whole numbers may have a bound, as in 2x16:int64:1000"
        )
    return shape, kind or FLOAT


def draw_inputs(
    shapes: Sequence[tuple[int, ...]], kinds: Sequence[str], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The same random inputs every time; whole numbers are 0 or 1 where no bound is given."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        _draw(shape, kind, dtype, generator) for shape, kind in zip(shapes, kinds, strict=True)
    )


def _draw(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    name, _, bound = kind.partition(":")
    if name in WHOLE:
        high = int(bound or 2)
        return torch.randint(high, shape, generator=generator).to(getattr(torch, name))
    wide = torch.complex128 if name in COMPLEX else torch.float64
    drawn = torch.randn(shape, dtype=wide, generator=generator)
    return drawn.to(dtype if name == FLOAT else getattr(torch, name))
