"""What models return is returned: structures, numbers, nothing, their own input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from exactness import seeded
from habits.habit import Net, assert_refused, assert_same


class Returning(Net):
    """A network with two outputs; `arrange` makes of them and the input what it returns."""

    arrange: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.norm(self.conv(x)))
        return self.arrange(self.head(y.mean((2, 3))), y, x)


def returning(arrange: Any) -> Any:
    def build() -> nn.Module:
        made = seeded(Returning())
        made.arrange = arrange
        return made

    return build


def use(model: Any, x: torch.Tensor) -> Any:
    found = []
    for inputs in (x, x[:3]):  # another number of samples as well
        y = model(inputs)
        tensors = [t for t in pytree.tree_leaves(y) if isinstance(t, torch.Tensor)]
        sum(t.square().sum() for t in tensors if t.requires_grad).backward()
        found.append(y)
    return found


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Result:
    logits: Any
    features: Any
    loss: Any = None


@dataclass
class Unknown:
    logits: Any


torch.export.register_dataclass(Result)


@pytest.mark.parametrize(
    "arrange",
    [
        lambda y, f, x: {"y": y, "more": [f, (y, None)], "loss": None},
        lambda y, f, x: Pair(f, {"y": y}),
        lambda y, f, x: (None, y, 3, 0.5, "name", True, f),
        lambda y, f, x: Result(y, f),
        lambda y, f, x: (y, y, f),
        lambda y, f, x: (y.sum(), f.argmax(1), f > 0),
        lambda y, f, x: (y, f.shape, torch.broadcast_shapes((3, 1), (1, 2))),
    ],
    ids=["dict", "named tuple", "numbers", "dataclass", "twice", "types", "sizes"],
)
def test_structures_numbers_and_nothing_are_returned(arrange: Any) -> None:
    assert_same(use, build=returning(arrange))


@pytest.mark.parametrize(
    "arrange",
    [
        lambda y, f, x: (y, x),
        lambda y, f, x: (x, x * 2.0, y, x),
        lambda y, f, x: [y, x.view(x.shape[0], -1)],
    ],
    ids=["input", "input twice", "view"],
)
def test_a_model_may_return_its_input(arrange: Any) -> None:
    assert_same(use, build=returning(arrange))


@pytest.mark.parametrize(
    "arrange",
    [
        lambda y, f, x: y * (1.0 / x.shape[0]),
        lambda y, f, x: y / x.shape[0] + x.shape[0] ** -0.5,
        lambda y, f, x: (y, x.shape[0], 1.0 / x.shape[0], 2 * x.shape[0] + x.shape[1]),
        lambda y, f, x: y.new_full((x.shape[0], 2), 1.0 / x.shape[0]) + y[:, :2],
    ],
    ids=["factor", "power", "returned", "filled"],
)
def test_numbers_made_of_the_batch_size_are_those_of_this_batch(arrange: Any) -> None:
    assert_same(use, build=returning(arrange))


def test_an_unknown_structure_is_refused_with_what_to_do() -> None:
    sentence = "returns a Unknown, .* torch.export.register_dataclass"
    assert_refused(use_logits, sentence, build=returning(lambda y, f, x: Unknown(y)))


def use_logits(model: Any, x: torch.Tensor) -> Any:
    return model(x).logits


def test_elements_chosen_by_their_value_are_refused_by_the_operator_and_the_line() -> None:
    class Chosen(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            f = self.conv(x)
            return f[f > 0].sum()

    sentence = (
        r"number of 'index' \(return f\[f > 0\]\.sum\(\), .*test_outputs.py:\d+\) that is only"
    )
    assert_refused(use, sentence, build=lambda: seeded(Chosen()))
