"""Every module of PyTorch's own test suite with its sample inputs, in training and evaluation."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db

from outside_cases.case import Case, as_module, number, seed_everything

DTYPES = {"float32": 10, "float64": 4}  # how many samples of each at most


@cache
def infos() -> dict[str, Any]:
    return {info.name.removeprefix("nn."): info for info in module_db}


def groups() -> list[str]:
    """Names of modules, dtypes and modes, e.g. Conv2d:float32:train."""
    return [
        f"{name}:{dtype}:{mode}"
        for name, info in infos().items()
        for dtype in DTYPES
        for mode in ("train", "eval")
        if getattr(torch, dtype) in info.dtypes
    ]


def most(group: str) -> int:
    return DTYPES[group.split(":")[1]]


def cases(group: str) -> list[Case]:
    name, dtype_name, mode = group.split(":")
    info, training, dtype = infos()[name], mode == "train", getattr(torch, dtype_name)
    seed_everything(number(group))
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=False, training=training
    )
    found = []
    for index, sample in enumerate(samples):
        case = f"modules:{group}:{index}"
        make = partial(build, info.module_cls, sample, dtype, number(case))
        found.append(Case(case, make, training, num_steps=2))
    return found


class Cloned(nn.Module):
    """A module that writes into what it is given, given a copy: no leaf may be written into."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.module(x.clone(), *args, **kwargs)


def build(kind: Any, sample: Any, dtype: torch.dtype, seed: int) -> Any:
    """A module of this kind with the sample's arguments, and what the sample calls it with."""
    seed_everything(seed)
    made, given = sample.constructor_input, sample.forward_input
    module = kind(*made.args, **made.kwargs).to(dtype)
    if getattr(module, "inplace", False):
        module = Cloned(module)
    if isinstance(module, LazyModuleMixin):
        module(*given.args, **given.kwargs)  # its parameters are made by its first call
    return as_module(module, given.args, dict(given.kwargs), seed)
