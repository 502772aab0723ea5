"""How tensors lie in memory, and what stands outside of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from math import inf
from typing import Any

import torch

Wait = Callable[[], torch.Tensor]  # for a tensor that is on its way


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """As a person writes it.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """The format of a tensor, so that what arrives elsewhere keeps it."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if channels_last is None or x.is_contiguous():
        return torch.contiguous_format
    return (
        channels_last if x.is_contiguous(memory_format=channels_last) else torch.contiguous_format
    )


def autocast_to(kind: str, dtype: torch.dtype | None) -> Any:
    """torch.autocast to this type on a kind of device; off where it is None."""
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, dtype, enabled=dtype is not None)


def memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest: the order in which torch draws numbers for it."""
    if x.is_contiguous():
        return tuple(range(x.ndim))
    return tuple(sorted(range(x.ndim), key=lambda dim: -x.stride(dim)))


def like(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An empty tensor of another shape that lies in memory as x does."""
    return torch.empty_permuted(shape, memory_order(x), dtype=x.dtype, device=x.device)


def filling(fill: float, dtype: torch.dtype) -> float:
    """What stands for a number outside a tensor of this type: the least of whole ones for -inf."""
    if fill == -inf and not (dtype.is_floating_point or dtype.is_complex):
        return torch.iinfo(dtype).min
    return fill
