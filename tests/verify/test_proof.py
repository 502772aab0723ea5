"""Comparing a plan with one device: what passes, what fails, and by which measure."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, ShardwiseError, capture
from shardwise.comm.in_process import World
from shardwise.graph.layer_graph import Layer
from shardwise.runtime.handle import Handle
from shardwise.verify import TOLERANCE, Comparison, compare, noise, trial
from shardwise.verify.comparison import differences
from shardwise.verify.results import PlanResult, summary


def compared(
    model: nn.Module, x: torch.Tensor, world: int = 2, training: bool = True, **degrees: int
) -> list[Comparison]:
    """What rank 0 finds when the model runs under a uniform plan."""
    graph = {True: capture(model, x), False: None}
    plan = Plan.uniform(graph[True], world, **degrees)  # type: ignore[arg-type]
    graphs = None if not training else lambda *_: graph[True]
    return World(world).run(
        lambda comm: compare(model, plan, (x,), comm, 2, graphs=graphs, training=training)  # type: ignore[arg-type]
    )[0]


def failed(results: list[Comparison]) -> set[str]:
    assert results
    return {c.name for c in results if not c.passed}


X = seeded_input((4, 8))


# -- networks that keep few digits -----------------------------------------------------------------


def ill_conditioned(spread: float = 1e-8) -> tuple[nn.Sequential, torch.Tensor]:
    """Batch norm over four values that differ in their eighth digit only."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, eps=1e-24), nn.Tanh(), nn.Linear(8, 3))
    seeded(net)
    return net, seeded_input((1, 8)) + spread * seeded_input((4, 8), seed=1)


class SinglePrecision(nn.Module):
    """Means in float32, whatever the model is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        return self.head(y * y.float().square().mean((2, 3), keepdim=True).to(x.dtype))


def test_batch_norm_of_nearly_equal_values_is_judged_by_its_own_noise() -> None:
    results = compared(*ill_conditioned(), c=2)
    assert not failed(results)
    noisy = [c for c in results if c.error > TOLERANCE]
    assert noisy and all(c.noise and c.limit >= c.noise for c in noisy)
    assert {c.origin for c in noisy} == {"in '1'"}


def test_a_section_in_float32_is_judged_by_its_own_noise() -> None:
    results = compared(seeded(SinglePrecision()), seeded_input((2, 3, 8, 8)), h=2)
    assert not failed(results)
    noisy = [c for c in results if c.limit > TOLERANCE]
    assert any(c.error > TOLERANCE for c in noisy)
    assert all(c.limit < 1e-3 for c in noisy)
    assert {c.origin for c in noisy} == {"before 'head'"}


class Fixed(nn.Module):
    """What lies before it gets no gradient, which would be huge where digits are lost."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


@pytest.mark.parametrize(("spread", "noise"), [(1e-10, 1e-8), (1.0, 0.0)])
@pytest.mark.parametrize("excess", [1.0, 1e-2, 1e-4])
def test_a_wrong_gradient_of_one_rank_is_found_above_the_noise(
    excess: float, spread: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Handle.full_gradients

    def wrong(handle: Handle, *args: Any) -> Any:
        if handle.comm.rank == 1:
            gradient = handle._state.blocks.params()["3.weight"].grad
            assert gradient is not None
            gradient.mul_(1.0 + excess)
        return real(handle, *args)

    monkeypatch.setattr(Handle, "full_gradients", wrong)
    model, x = ill_conditioned(spread)
    results = compared(seeded(nn.Sequential(*model[:2], Fixed(), model[3])), x, c=2)
    (found,) = [c for c in results if (c.kind, c.name) == ("gradient", "3.weight")]
    assert not found.passed and found.error > 0.1 * excess
    assert found.noise is not None and found.noise >= noise


def test_an_operator_that_is_wrong_on_a_part_of_the_samples_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(layer: Layer, in_place: bool = False) -> Any:
        def run(tensors: list[Any]) -> Any:
            part = layer.traits.called == "tanh" and tensors[0].shape[0] < 4
            return layer.call(tensors, in_place) * (2.0 if part else 1.0)

        return run

    monkeypatch.setattr(Layer, "caller", broken)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    results = compared(seeded(model), X, n=2)
    worst = max(results, key=lambda c: c.severity)
    assert {"output", "2.weight"} <= failed(results)
    assert worst.error > 0.1 and worst.noise is not None and worst.noise < 1e-13
    assert worst.cause == "the first layer that differs is '1', on rank 0"
    plan = Plan.uniform(capture(model, X), n=2)
    covered, different, cause, verdict = summary([PlanResult("n=2", plan, tuple(results))])[:4]
    assert covered.startswith("covered: training") and "not covered: evaluation" in covered
    assert different.startswith("different: ")
    assert "likely cause: the first layer that differs is '1', on rank 0" in (cause, verdict)


def test_a_model_that_does_not_repeat_itself_is_named_as_the_cause() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * random.random()

    results = compared(seeded(Draws()), X, n=2)
    assert all("one device itself gives something else" in c.cause for c in results if not c.passed)
    assert failed(results)


def test_what_capturing_does_not_see_is_named_as_the_cause() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * (2.0 if torch.compiler.is_exporting() else 1.0)

    results = compared(seeded(Outside()), X, n=2)
    sentence = (
        "it differs on one worker, too, so that capturing it is at fault: values that forward"
    )
    assert failed(results)
    assert all(c.cause.startswith(sentence) for c in results if not c.passed)


def test_what_one_device_cannot_determine_passes_and_says_so() -> None:
    assert Comparison("weight", "w", 40.0, noise=0.2).passed
    assert Comparison("weight", "w", 40.0, noise=0.2).undetermined
    assert not Comparison("weight", "w", 40.0, noise=0.01).passed
    assert not Comparison("weight", "w", inf, noise=0.2).passed  # not a number on one side
    assert Comparison("weight", "w", inf, noise=inf).passed
    assert not Comparison("weight", "w", inf, noise=inf, fault="differs between ranks").passed


def test_noise_is_not_measured_where_rounding_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_shaken", lambda *_: pytest.fail("measured"))
    results = compared(seeded(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), X, c=2)
    assert not failed(results) and all(c.noise is None for c in results)


def test_the_same_changes_of_the_last_bit_are_drawn_every_time() -> None:
    first, second = (compared(*ill_conditioned(), c=2) for _ in range(2))
    assert first == second


def test_whole_numbers_keep_their_last_bit() -> None:
    x = torch.tensor([0.0, 3.0, 0.1, inf, nan], dtype=torch.float64)
    for draw in range(2):
        changed = noise.LastBit(draw).changed(x)
        same = (changed == x).tolist()
        assert same == [True, True, False, True, False] and changed[4].isnan()
        assert abs(float(changed[2]) / 0.1 - 1.0) < 5e-16


# -- what is compared ------------------------------------------------------------------------------


def difference(found: Any, expected: Any, kind: str = "output") -> Comparison:
    (result,) = differences({(kind, "y"): found}, {(kind, "y"): expected})
    return result


def tensor(*values: Any, dtype: torch.dtype | None = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        (tensor(1.0, nan, inf), tensor(1.0, nan, inf), 0.0),
        (tensor(1.0, 2.0 + 1e-9, -inf), tensor(1.0, 2.0, -inf), 5e-10),
        (tensor(nan, 2.0), tensor(1.0, 2.0), inf),
        (tensor(1.0, 2.0), tensor(nan, 2.0), inf),
        (tensor(inf, 2.0), tensor(-inf, 2.0), inf),
        (tensor(inf, 2.0), tensor(nan, 2.0), inf),
        (tensor(3.0 + 4.0j, dtype=None), tensor(3.0 + 5.0j, dtype=None), 1 / 34**0.5),
        (tensor(1, 2, 3, 4, dtype=None), tensor(1, 2, 3, 5, dtype=None), 0.25),
        (tensor(True, False, dtype=None), tensor(True, False, dtype=None), 0.0),
        (tensor(), tensor(), 0.0),
        (None, None, 0.0),
        (3, 3, 0.0),
    ],
)
def test_the_error_of_a_tensor(found: Any, expected: Any, error: float) -> None:
    result = difference(found, expected)
    assert result.error == pytest.approx(error, rel=1e-6) and not result.fault
    assert result.passed == (error in (0.0, 5e-10))


@pytest.mark.parametrize(
    ("found", "expected", "fault"),
    [
        (tensor(1.0), tensor(1.0)[0], "1 of float64 instead of a scalar of float64"),
        (tensor(1.0).float(), tensor(1.0), "1 of float32 instead of 1 of float64"),
        (tensor(1.0)[None], tensor(1.0), "1x1 of float64 instead of 1 of float64"),
        (tensor(1), tensor(1, dtype=None), "1 of float64 instead of 1 of int64"),
        (tensor(1.0), None, "1 of float64 instead of None"),
        (3, 4, "3 instead of 4"),
    ],
)
def test_another_shape_or_dtype_is_a_fault(found: Any, expected: Any, fault: str) -> None:
    result = difference(found, expected)
    assert result.fault == fault and not result.passed


def test_no_gradient_is_as_good_as_zeros() -> None:
    assert difference(tensor(0.0, 0.0), None, "gradient").passed
    assert difference(None, tensor(0.0, 0.0), "gradient").passed
    assert not difference(None, tensor(0.0, 1e-3), "gradient").passed
    assert not difference(tensor(0.0, 1e-3), None, "gradient").passed


def test_tolerances_follow_the_dtype() -> None:
    for dtype, error in ((torch.float32, 5e-6), (torch.bfloat16, 0.02), (torch.float16, 3e-3)):
        expected = torch.ones(2, dtype=dtype)
        found = {("output", "y"): expected + error, ("loss", "step 1"): tensor(1.0 + error)}
        results = differences(found, {("output", "y"): expected, ("loss", "step 1"): tensor(1.0)})
        assert not failed(results) and all(c.error > TOLERANCE for c in results)


def test_outputs_have_the_names_of_their_places() -> None:
    model = seeded(Outputs(lambda y: {"classes": (y, y > 0)}))
    names = [c.name for c in compared(model, X, training=False, n=2)]
    assert names == ["output['classes'][0]", "output['classes'][1]"]
    found, expected = trial._outputs((X, X)), trial._outputs({"a": X, "b": X})
    assert len(failed(differences(found, expected))) == 4


class Outputs(nn.Module):
    """A model that returns whatever is made of its last layer."""

    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.unused, self.returned = nn.Linear(8, 6), nn.Linear(2, 2), returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(self.layer(x))


@pytest.mark.parametrize(
    "returned",
    [
        lambda y: (y, y.argmax(1), y > 0),
        lambda y: {"classes": y.argmax(1)},
        lambda y: y > 0,
        lambda y: (y.relu() + 0.0).log(),
        lambda y: torch.complex(y, y * y),
        lambda y: torch.complex(y, y * y).conj(),
        lambda y: (y.detach(), y.sum(1)),
        lambda y: y.detach(),
    ],
    ids=["integers too", "only integers", "a mask", "infinite", "complex", "conjugate",
         "some detached", "detached"],
)  # fmt: skip
def test_outputs_of_every_kind_are_compared(returned: Callable[[torch.Tensor], Any]) -> None:
    results = compared(seeded(Outputs(returned)), X, n=2)
    assert not failed(results)
    assert {"output", "weight"} <= {c.kind for c in results}


def test_evaluation_compares_outputs_only() -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)))
    results = compared(model, X, training=False, n=2)
    assert [(c.kind, c.passed) for c in results] == [("output", True)]


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            return x
        raise RuntimeError("out of luck\nand of lines")


def test_a_model_that_fails_on_one_device_is_a_sentence_on_every_rank() -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 8), Failing()))
    plan = Plan.uniform(capture(model, X), 2, n=2)
    said = []

    def work(comm: Any) -> None:
        try:
            compare(model, plan, (X,), comm)
        except ShardwiseError as error:
            said.append(str(error))

    World(2).run(work)
    assert said == ["Sequential fails on one device in layer '1': RuntimeError: out of luck"] * 2
