"""The parts of the strong scaling benchmark: its steps are exact, and its limits hold."""

from __future__ import annotations

import pytest

from shardwise import Plan, capture, run_local, zoo
from strong_scaling import stepper, train, volumes

EDGE = 16


def losses(plan: Plan | None, batch: int) -> list[float]:
    step = stepper(plan, batch, EDGE)
    return [step() for _ in range(2)]


def test_parts_of_a_volume_have_the_loss_of_the_whole() -> None:
    plan = Plan.uniform(capture(zoo.build("unet3d"), volumes(1, EDGE)[0]), h=2)
    parts = run_local(losses, 2, plan, 1)
    whole = losses(None, 1)
    assert [sum(step) for step in zip(*parts, strict=True)] == pytest.approx(whole, rel=1e-4)


def test_a_rank_may_not_use_more_memory_than_its_limit() -> None:
    free, tight = (run_local(train, 2, None, EDGE, limit)[0] for limit in (None, 4 << 20))
    assert isinstance(free, float)
    assert isinstance(tight, str) and "allocate" in tight
