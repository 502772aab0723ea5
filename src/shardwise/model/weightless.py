"""Tensors without weight: they have a shape and a type, and stand for others in a capture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def device_of(tensor: torch.Tensor, home: torch.device | None = None) -> torch.device:
    """Where a tensor lies, or will lie when it gets values: at home, or on torch's default."""
    if not tensor.is_meta:
        return tensor.device
    device = home or torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def weightless(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A parameter of the same shape that takes no memory; a copy of a buffer (export writes it).

    What has no values itself is stood for by something on a real device, as it will be run.
    """
    device, dtype = device_of(tensor), dtype or tensor.dtype
    if not isinstance(tensor, nn.Parameter):
        real = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.clone()
        return real.to(dtype)
    if tensor.is_contiguous():
        data = torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)
    else:  # how it lies in memory may decide in which order random numbers are drawn
        data = torch.empty_like(tensor.detach(), dtype=dtype, device=device)
        data.untyped_storage().resize_(0)
    return nn.Parameter(data, tensor.requires_grad)


def stand_ins(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same tensors; where only some have values, the others are stood for on a real device."""
    if all(t.is_meta for t in tensors):
        return tensors
    return [weightless(t) if t.is_meta else t for t in tensors]
