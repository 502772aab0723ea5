"""Modules and the tensors they store, by name."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def copy_structure(module: nn.Module) -> Any:
    """The same modules, with tables, lists and the like of their own; tensors are shared."""
    return _twin(module, {})


def _twin(value: Any, memo: dict[int, Any]) -> Any:
    """What stands for a value in the copy: modules, and what may hold some, are copied."""
    if id(value) in memo:
        return memo[id(value)]
    kind: Any = type(value)
    twin: Any
    if isinstance(value, nn.Module):
        twin = memo[id(value)] = kind.__new__(kind)
        twin.__dict__ = {name: _twin(own, memo) for name, own in value.__dict__.items()}
    elif kind is types.MethodType and isinstance(value.__self__, nn.Module):
        twin = types.MethodType(value.__func__, _twin(value.__self__, memo))
    elif kind in (dict, OrderedDict):
        twin = memo[id(value)] = kind()
        items = dict.copy(value).items()  # hooks may come and go meanwhile
        twin.update((key, _twin(own, memo)) for key, own in items)
    elif kind is list:
        twin = memo[id(value)] = []
        twin.extend(_twin(own, memo) for own in value)
    elif kind in (tuple, set):
        twin = kind(_twin(own, memo) for own in value)
    else:
        return value
    return twin


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def resolve(root: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(root.get_submodule(path), leaf)


def assign(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    table = module._parameters if leaf in module._parameters else module._buffers
    table[leaf] = tensor  # type: ignore[assignment]
