"""Every operator, under uniform and random plans, equals one device."""

from __future__ import annotations

import pytest

from exactness import assert_exact, seeded, seeded_input
from operator_cases import OPERATORS
from shardwise.model.capture import capture
from shardwise.plans.plan import Plan

UNIFORM = [{"n": 4}, {"h": 2, "w": 2}, {"n": 2, "h": 2}, {"c": 4}, {"f": 4}, {"c": 2, "f": 2}]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_split_in_two_equals_one_device(name: str) -> None:
    module, shape = OPERATORS[name]
    module, x = seeded(module), seeded_input(shape)
    graph = capture(module, x)
    plans = [Plan.random(graph, 2, seed=1), Plan.uniform(graph, h=2)]
    assert not plans[0].whole or name == "no strategy"
    assert_exact(module, x, plans, graph)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_under_any_plan_equals_one_device(name: str) -> None:
    module, shape = OPERATORS[name]
    module, x = seeded(module), seeded_input(shape)
    graph = capture(module, x)
    plans = [Plan.uniform(graph, 4, **degrees) for degrees in UNIFORM]
    plans += [Plan.random(graph, world, seed=world) for world in (2, 3, 4, 8)]
    assert_exact(module, x, plans, graph)
