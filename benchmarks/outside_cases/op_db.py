"""Every operator of PyTorch's own test suite with its sample inputs, in place too."""

from __future__ import annotations

import contextlib
import random
import sys
from functools import cache, partial
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as invocations

from outside_cases.case import Case, as_module, number, seed_everything

DTYPES = {"float32": 12, "float64": 6, "bfloat16": 2}  # how many samples of each at most
UNDEFINED = ("empty", "resize")  # operators with these in their names leave memory as it is


def _without_seeds() -> None:
    """Operators that draw are wrapped so that they seed first, which no model does."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.testing._internal") and hasattr(
            module, "wrapper_set_seed"
        ):
            module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # type: ignore[attr-defined]


_without_seeds()


@cache
def operators() -> dict[str, Any]:
    """Operators by name, with their variants: nn.functional.pad.circular, add.inplace, ..."""
    found = {}
    for op in invocations.op_db:
        if any(word in op.name for word in UNDEFINED):
            continue
        name = ".".join(filter(None, [op.name, op.variant_test_name.replace(":", "_")]))
        found[name] = (op, op.op)
        if op.inplace_variant is not None:
            found[f"{name}.inplace"] = (op, partial(_in_place, op.inplace_variant))
    return found


def _in_place(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return function(x.clone(), *args, **kwargs)


def groups() -> list[str]:
    """Names of operators and dtypes, e.g. nn.functional.pad.circular:float32."""
    return [
        f"{name}:{dtype}"
        for name, (op, _) in operators().items()
        for dtype in DTYPES
        if op.supports_dtype(getattr(torch, dtype), "cpu")
    ]


def cases(group: str) -> list[Case]:
    name, dtype = group.split(":")
    op, function = operators()[name]
    seed_everything(number(group))
    samples = list(op.sample_inputs("cpu", getattr(torch, dtype)))
    return [
        Case(f"op_db:{group}:{index}", partial(_build, group, function, sample, index))
        for index, sample in enumerate(samples)
    ]


def most(group: str) -> int:
    """How many cases of a group are tried where not all are asked for."""
    return DTYPES[group.split(":")[1]]


def _build(group: str, function: Any, sample: Any, index: int) -> Any:
    seed = number(f"{group}:{index}")
    if random.Random(seed).random() < 0.15:
        with contextlib.suppress(RuntimeError):  # sparse tensors have no strides
            sample = sample.noncontiguous()
    return as_module(function, (sample.input, *sample.args), dict(sample.kwargs), seed)
