"""What forward leaves in its modules is there afterwards, or whoever asks for it is told so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exactness import seeded
from habits.habit import Net, assert_refused, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch.export's


class Leaving(Net):
    """A network that leaves something; what, is in `leave`, which is given the features."""

    def __init__(self, leave: Any) -> None:
        super().__init__()
        self.do, self.last, self.calls, self.seen = [leave], None, 0, []
        self.cache: Any = None
        self.table: dict[Any, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        factor = self.do[0](self, y)
        return self.head(y.mean((2, 3))) * (1.0 if factor is None else factor)


def leaving(leave: Any) -> Any:
    return lambda: seeded(Leaving(leave))


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y.square().sum().backward()
    return y


def data(model: Any, y: torch.Tensor) -> None:
    model.size, model.norm.note = tuple(y.shape[2:]), {"training": model.training}


def cached(model: Any, y: torch.Tensor) -> Any:
    if model.cache is None:
        model.cache = torch.arange(4.0, dtype=y.dtype)
    if y.shape[1] not in model.table:
        model.table[y.shape[1]] = torch.ones(1, dtype=y.dtype) * 3
    return model.cache * model.table[y.shape[1]]


def flagged(model: Any, y: torch.Tensor) -> Any:
    """The first call is another than all later ones."""
    first, model.last = model.last is None, "called"
    return 0.5 if first else 2.0


def passed_on(model: Any, y: torch.Tensor) -> Any:
    """What is collected anew in every call."""
    model.seen.clear()
    model.seen.append(y.mean())
    return model.seen[0]


def test_plain_data_that_forward_leaves_is_there_afterwards() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        first = step(model, x), model.size, dict(model.norm.note)
        return first, model.eval()(x), dict(model.norm.note)

    assert_same(use, leaving(data))


@pytest.mark.parametrize("leave", [cached, flagged, passed_on])
def test_what_later_calls_read_of_earlier_ones_is_followed(leave: Any) -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return [step(model, x), step(model, 2 * x), step(model.eval(), x), step(model, x)]

    assert_same(use, leaving(leave), under=["h=2", "random"])


def collect(model: Any, y: torch.Tensor) -> None:
    model.seen.append(y)


def keep(model: Any, y: torch.Tensor) -> None:
    model.last = y


def keep_pair(model: Any, y: torch.Tensor) -> None:
    model.last = {"loss": y.square().mean()}


ASKED: list[Any] = [
    lambda last: last.sum(),
    lambda last: torch.ones(1) + last,
    lambda last: last["loss"],
    lambda last: 2 * last,
    lambda last: float(last),
    lambda last: torch.nn.functional.mse_loss(last, torch.ones(1)),
    lambda last: [x for x in last],
]


def test_tensors_that_forward_leaves_are_refused_where_they_are_used() -> None:
    sentence = "leaves tensors.* in 'last' of the model.*; let it return them"

    def use(model: Any, x: torch.Tensor) -> Any:
        step(model, x)
        if hasattr(model, "plan"):
            for ask in ASKED:
                with pytest.raises(ValueError, match=sentence):
                    ask(model.last)
            assert "leaves tensors" in repr(model.last)
            model.last.mean()

    assert_refused(use, sentence, leaving(keep), under=["n=2", "random"])

    def in_loss(model: Any, x: torch.Tensor) -> Any:
        return model(x).sum() + model.last["loss"]

    assert_refused(in_loss, sentence, leaving(keep_pair), under=["f=2"])

    def collected(model: Any, x: torch.Tensor) -> Any:
        for _ in range(3):
            model.seen.clear()
            step(model, x)
        return model.seen[0].sum()

    assert_refused(collected, sentence.replace("last", "seen"), leaving(collect), under=["h=2"])


def count(model: Any, y: torch.Tensor) -> Any:
    model.calls += 1
    return 1.0 / model.calls


def average(model: Any, y: torch.Tensor) -> Any:
    mean = y.detach().mean()
    model.cache = mean if model.cache is None else 0.9 * model.cache + 0.1 * mean
    return model.cache


def collect_shapes(model: Any, y: torch.Tensor) -> None:
    model.seen.append(tuple(y.shape[1:]))


@pytest.mark.parametrize("leave", [count, average, collect, collect_shapes])
def test_a_model_whose_calls_depend_on_earlier_ones_is_refused(leave: Any) -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return step(model, x), step(model, x)

    sentence = "forward changes '.*' of the model, so that later calls depend on earlier ones"
    assert_refused(use, sentence, leaving(leave), under=["h=2"])
