"""Modes and attributes of modules that change after wrapping are followed, or refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exactness import seeded
from habits.habit import EVERY, assert_refused, assert_same, image
from shardwise import Plan, ShardwiseError, capture, parallelize
from shardwise.comm.in_process import InProcess, World
from shardwise.model.attribute_values import as_read, token, twin


@dataclass(slots=True)
class Options:
    power: int = 1


class Drop(nn.Module):
    """Stochastic depth, as it is mostly written; deterministic here."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rate if self.training else x


class Changing(nn.Module):
    """A network whose forward reads whatever its author thought of."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), Drop())
        self.second, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 4)
        self.alpha, self.scales, self.options = 1.0, [1.0, 2.0], Options()
        self.mask = torch.ones(6, 1, 1, dtype=torch.float64)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.backbone(x) * self.mask
        if self.alpha:
            y = y + self.alpha * torch.relu(self.second(y))
        y = y * self.scales[0] ** self.options.power
        return self.head(y.mean((2, 3)))


def build() -> nn.Module:
    return seeded(Changing())


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y.square().sum().backward()
    return y


def set_alpha(model: Any) -> None:
    model.alpha = 0.0


def set_half(model: Any) -> None:
    model.alpha = 0.5


def set_eps(model: Any) -> None:
    model.backbone[1].eps = 0.1


def set_rate(model: Any) -> None:
    model.backbone[2].rate = 0.25


def set_scale(model: Any) -> None:
    model.scales[0] = 3.0


def set_option(model: Any) -> None:
    model.scales[0], model.options.power = 2.0, 3


def set_mask(model: Any) -> None:
    model.mask = torch.arange(6, dtype=torch.float64).view(6, 1, 1)


def write_mask(model: Any) -> None:
    model.mask[2:4] = 0


def set_stride(model: Any) -> None:
    model.second.dilation, model.second.padding = (2, 2), (2, 2)


def patch(model: Any) -> None:
    model.backbone[2].forward = lambda x: x.tanh()


def evaluate_backbone(model: Any) -> None:
    model.backbone.eval()


def evaluate_drop(model: Any) -> None:
    model.backbone[2].eval()


def evaluate_norm(model: Any) -> None:
    model.backbone[1].eval()


def train_drop(model: Any) -> None:
    model.eval()
    model.backbone[2].train()


CHANGES = [
    set_alpha, set_half, set_eps, set_rate, set_scale, set_option, set_mask, write_mask, set_stride,
    patch, evaluate_backbone, evaluate_drop, evaluate_norm, train_drop,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_forward_reads_may_change_after_wrapping(change: Any) -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        first = step(model, x)
        change(model)
        second = step(model, x)
        return first, second, step(model, x[:2]), step(model.eval(), x)

    # What is written in place is written for all copies of the graphs that these plans share.
    assert_same(use, build, under=["h=2"] if change is write_mask else EVERY)


def test_what_changes_back_is_not_captured_again() -> None:
    model: Any = parallelize(plain := build(), Plan.uniform(capture(plain, image())))
    for alpha in (1.0, 0.0, 1.0, 0.0, 1.0):
        model.alpha = alpha
        model(image())
    assert len(model._shardwise.programs.graph._captured) == 2


def test_what_forward_does_not_read_may_change_without_a_new_capture() -> None:
    model: Any = parallelize(plain := build(), Plan.uniform(capture(plain, image())))
    for index in range(3):
        model.seen, model.best, model.second.note = index, {"accuracy": index}, [index]
        model(image())
    assert len(model._shardwise.programs.graph._captured) == 1


def test_ranks_that_set_different_attributes_are_told_so() -> None:
    def work(comm: InProcess) -> list[str]:
        plain, heard = build(), []
        model: Any = parallelize(plain, Plan.uniform(capture(plain, image()), n=2), comm=comm)
        for alpha in (0.5, 0.5 * comm.rank, 0.25):
            model.alpha = alpha
            try:
                step(model, image())
                heard.append("")
            except ShardwiseError as error:
                heard.append(str(error))
        return heard

    sentence = "rank 1 has other attributes of its modules than rank 0; all ranks must set the same"
    assert World(2).run(work) == [["", sentence, ""]] * 2


def test_copies_of_a_model_keep_what_was_changed() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        model.alpha, model.scales[0] = 0.5, 2.0
        twin = copy.deepcopy(model)
        model.alpha = 0.0
        return model(x), twin(x)

    assert_same(use, build)


def test_a_new_head_or_forward_is_refused_where_it_is_set() -> None:
    def head(model: Any, x: torch.Tensor) -> Any:
        model.head = nn.Linear(6, 2).double()

    def forward(model: Any, x: torch.Tensor) -> Any:
        model.forward = lambda x: x

    assert_refused(head, "the model is parallel: change the modules of the original", build)
    assert_refused(forward, "forward .*cannot be replaced; change that of the original", build)


# -- parts of the model ----------------------------------------------------------------------------


def test_modules_with_whole_weights_may_be_called_by_themselves() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        features = model.backbone(x)
        features.square().sum().backward()
        (model(x).sum() + model.second(features.detach()).square().sum()).backward()
        return features

    assert_same(use, build, under=["n=2", "h=2"])


def test_modules_with_split_weights_are_refused_by_themselves() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return model.backbone(x)

    def direct(model: Any, x: torch.Tensor) -> Any:
        return model.backbone[0].forward(x)

    sentence = "module 'backbone.0' of a parallel model cannot be called by itself: .* whole model"
    assert_refused(use, sentence, build, under=["f=2"])
    assert_refused(direct, sentence, build, under=["f=2"])


def test_modules_are_of_their_own_class_while_they_are_captured() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.ReLU()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) if type(layer) is nn.Conv2d else -layer(x)
            return x

    assert_same(step, lambda: seeded(Chooses()), under=["h=2"])


# -- objects that modules hold ---------------------------------------------------------------------


class Schedule:
    """An object as configurations are: of a plain class, with others in it."""

    def __init__(self, rate: float) -> None:
        self.rate, self.epoch = rate, 0
        self.inner: Any = None
        self.table = np.array([1.0, 2.0])

    def factor(self) -> float:
        return self.rate * float(self.table[0])


class Settings(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.second = nn.Conv2d(3, 6, 3, padding=1), Inner()
        self.config, self.several = Schedule(0.5), [Schedule(1.0), {"deep": Schedule(2.0)}]
        self.config.inner = Schedule(3.0)
        self.settings, self.names = Settings(power=2), ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x) * self.config.factor() + self.config.inner.factor()
        y = y * self.several[0].rate + self.several[1]["deep"].rate * len(self.names)
        return self.second(y) ** self.settings.power


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = Schedule(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.shared.rate if self.training else 1 + self.shared.factor())


def set_rate_of_config(model: Any) -> None:
    model.config.rate = 2.0


def set_inner(model: Any) -> None:
    model.config.inner.table[0] = 4.0


def set_in_list(model: Any) -> None:
    model.several[1]["deep"].rate = 0.25


def set_in_module(model: Any) -> None:
    model.second.shared.rate = 0.75


def set_another(model: Any) -> None:
    model.config = Schedule(1.5)
    model.config.inner = Schedule(2.5)


def set_setting(model: Any) -> None:
    model.settings["power"] = 3


def append_name(model: Any) -> None:
    model.names.append("b")


OBJECTS = [set_rate_of_config, set_inner, set_in_list, set_in_module, set_another, set_setting]
OBJECTS += [append_name]


def test_what_forward_reads_of_objects_may_change_after_wrapping() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        found = [step(model, x)]
        for change in OBJECTS:
            change(model)
            found += [step(model, x)]
        return found, step(model.eval(), x), step(model, x[:2])

    assert_same(use, lambda: seeded(Configured()), under=["h=2", "random"])


def test_copies_of_a_model_have_objects_of_their_own() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        del model.settings
        model.settings = SimpleNamespace(power=3)
        twin = copy.deepcopy(model)
        model.config.rate = 4.0
        return model(x), twin.eval()(x), twin.train()(x)

    assert_same(use, lambda: seeded(Configured()), under=["f=2"])


def test_values_that_hold_themselves_are_told_apart() -> None:
    values = []
    for name in ("a", "b", "b"):
        own: list[Any] = [name, {"again": Schedule(1.0)}]
        own[1]["again"].inner = own
        values.append(own)
    first, second, third = map(token, values)
    reads = {Schedule: {"inner"}}
    assert as_read(first, reads) != as_read(second, reads) == as_read(third, reads)
    assert twin(values[0], reads) == values[0] and twin(values[0], reads) != values[1]


def test_what_forward_does_not_read_of_objects_may_change_without_a_new_capture() -> None:
    plain = seeded(Configured())
    model: Any = parallelize(plain, Plan.uniform(capture(plain, image())))
    for index in range(3):
        model.config.epoch, model.config.note = index, [index]
        model(image())
    assert len(model._shardwise.programs.graph._captured) == 1
    model.eval()(image())
    model.train()(image())
    assert len(model._shardwise.programs.graph._captured) == 2
    assert "__getattribute__" not in vars(Schedule)
