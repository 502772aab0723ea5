"""Modules drawn by the strategies of our own property tests, in more dtypes and worlds."""

from __future__ import annotations

from functools import partial
from typing import Any

import hypothesis
import torch
from torch import nn

from outside_cases.case import Case, number, seed_everything

PER_GROUP = 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def _kinds() -> dict[str, Any]:
    from test_properties import ALL

    return {name.replace(" ", "_"): strategy for name, strategy in ALL.items()}


def groups() -> list[str]:
    """Kinds and numbers, e.g. pooling.7."""
    return [f"{kind}.{index}" for index in range(200) for kind in _kinds()]


def most(group: str) -> int:
    return PER_GROUP


def cases(group: str) -> list[Case]:
    found: list[tuple[nn.Module, tuple[int, ...]]] = []
    settings = hypothesis.settings(
        max_examples=PER_GROUP,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @hypothesis.seed(number(group))
    @settings
    @hypothesis.given(_kinds()[group.split(".")[0]])
    def collect(drawn: Any) -> None:
        found.append(drawn)

    collect()
    return [
        Case(f"drawn:{group}:{index}", partial(_build, f"{group}:{index}", *drawn), num_steps=2)
        for index, drawn in enumerate(found[:PER_GROUP])
    ]


def _build(name: str, module: nn.Module, shape: tuple[int, ...]) -> Any:
    seed = number(name)
    seed_everything(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    return module.to(dtype), (torch.randn(shape, dtype=dtype),)
