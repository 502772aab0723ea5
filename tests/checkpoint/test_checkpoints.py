"""Checkpoints: a run goes on from them as if it had never stopped, under any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saving import OPTIMIZERS, make_plan, train_alone, train_from

from pool import shared_pool


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_with_other_workers_and_plans_as_if_undisturbed(
    tmp_path: Path, kind: str
) -> None:
    first = make_plan(4, None if kind == "delayed" else 1)
    legs = ((4, first, 0, 5, 3), (2, make_plan(2, 2), 3, 7, 5), (3, make_plan(3, 3), 5, 8, 8))
    for world, plan, start, last, save in legs:
        states = shared_pool(world).run(train_from, tmp_path, plan, kind, start, last, save)
        for state in states:
            assert_close(state, train_alone(kind, last))
