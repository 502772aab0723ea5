"""Calls that PyTorch's own test suite expects an error of: here every rank must give one too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleErrorEnum

from outside_cases import modules, op_db
from outside_cases.case import Case, as_module, number, seed_everything


def groups() -> list[str]:
    operators = [
        f"op.{name}" for name, (op, _) in op_db.operators().items() if op.error_inputs_func
    ]
    infos = modules.infos().items()
    return operators + [f"nn.{name}" for name, i in infos if i.module_error_inputs_func]


def most(group: str) -> int:
    return 8


def cases(group: str) -> list[Case]:
    kind, _, name = group.partition(".")
    seed_everything(number(group))
    builds = list(_operator(name, group) if kind == "op" else _module(name, group))
    return [
        Case(f"errors:{group}:{index}", build, must_fail=True) for index, build in enumerate(builds)
    ]


def _operator(name: str, group: str) -> Any:
    op, function = op_db.operators()[name]
    for index, error in enumerate(op.error_inputs("cpu")):
        sample = error.sample_input
        args = (sample.input, *sample.args)
        yield partial(as_module, function, args, dict(sample.kwargs), number(f"{group}{index}"))


def _module(name: str, group: str) -> Any:
    info = modules.infos()[name]
    errors = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    for error in errors:
        sample = error.module_error_input
        if error.error_on == ModuleErrorEnum.FORWARD_ERROR:
            yield partial(modules.build, info.module_cls, sample, torch.float32, number(group))
