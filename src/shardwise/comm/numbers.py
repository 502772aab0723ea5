"""Kinds of numbers: all travel as bytes, and those that can be added are summed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from shardwise.errors import ShardwiseError
from shardwise.tensors import dtype_name

ADDED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # as torch's own sums are
SUMMED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
UNKNOWN_TO_BACKENDS = {torch.int16: torch.int32}


def check_summed(x: torch.Tensor, what: str) -> None:
    """Whether sums over ranks are what one device's would be."""
    if x.dtype not in SUMMED and not x.is_complex():
        raise ShardwiseError(
            f"{what!r} is {dtype_name(x.dtype)}, which is not summed over ranks; "
            "convert it to int64 or float32"
        )


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, one after the other: the same bits wherever it is made."""
    wide = ADDED_IN.get(parts[0].dtype)
    if wide is None:
        return reduce(torch.add, parts)
    return reduce(torch.add, (part.to(wide) for part in parts)).to(parts[0].dtype)


def known_to_backends(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, of a kind that gloo and MPI can sum."""
    return x.to(UNKNOWN_TO_BACKENDS.get(x.dtype, x.dtype))
