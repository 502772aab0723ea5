"""A parallel model is called, asked and taken apart as the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from exactness import seeded, seeded_input
from habits.habit import Net, Wrap, assert_refused, assert_same, assert_same_script


class Masked(Net):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 2.0
    ) -> torch.Tensor:
        y = self.norm(self.conv(x)) * scale
        return self.head((y if mask is None else y * mask).mean((2, 3)))


class Named(Net):
    """Its argument, a method and an attribute are called as something of ours is."""

    plan = "mine"

    def forward(self, batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch)

    def record(self) -> str:
        return "mine"

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(1)


def two() -> tuple[torch.Tensor, ...]:
    return seeded_input((4, 3, 6, 6)), seeded_input((4, 6, 6, 6), seed=1)


def sequence() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)))


def test_inputs_are_given_by_place_or_by_name_in_any_order() -> None:
    def use(model: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return model(x, mask), model(x, mask=mask), model(mask=mask, x=x), model(x, mask, scale=2.0)

    assert_same(use, build=lambda: seeded(Masked()), inputs=two)


def test_an_argument_that_was_captured_as_a_number_keeps_its_value_or_is_refused() -> None:
    sentence = "argument 'scale' is 3.0, and must be a tensor"
    assert_refused(lambda m, x: m(x, scale=3.0), sentence, build=lambda: seeded(Masked()))
    more = "takes 1 input tensors, and got 2"
    assert_refused(lambda m, x: m(x, x[:, :1]), more, build=lambda: seeded(Masked()))


def test_names_of_the_model_come_before_ours() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return model(batch=x), model(x), model.record(), model.plan, model.predict(x)

    assert_same(use, build=lambda: seeded(Named()))


def test_a_sequence_is_counted_walked_and_indexed() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        kinds = [type(layer).__name__ for layer in model]
        return model(x), len(model), kinds, model[0].out_channels, isinstance(model, nn.Sequential)

    assert_same(use, build=sequence)


def test_a_part_of_a_sequence_runs_where_its_weights_are_whole_and_is_refused_elsewhere() -> None:
    assert_same(lambda model, x: model[:2](x), build=sequence, under=["n=2", "h=2"])
    assert_same(lambda model, x: model[1:3](x), build=sequence)
    sentence = "module '0' of a parallel model cannot be called by itself"
    assert_refused(lambda model, x: model[:2](x), sentence, build=sequence, under=["f=2"])


def unwrapped(model: Any) -> Any:
    """As many a library does it."""
    return unwrapped(model.module) if hasattr(model, "module") else model


def test_code_that_unwraps_ddp_finds_the_model_itself() -> None:
    assert_same(lambda model, x: (unwrapped(model)(x), dict(unwrapped(model).state_dict())))


def test_asking_for_the_module_of_a_parallel_model_is_answered_with_a_sentence() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return model.module(x) if hasattr(model, "plan") else model(x)

    assert_refused(use, "a parallel model is the module itself: leave out .module")


def test_a_module_of_its_own_named_module_stays() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    def use(model: Any, x: torch.Tensor) -> Any:
        return model(x), type(model.module).__name__

    assert_same(use, build=lambda: seeded(Wrapper()))


def test_norms_that_were_converted_for_ddp_are_batch_norms() -> None:
    def script(wrap: Wrap) -> Any:
        model, x = seeded(Net()), seeded_input((4, 3, 6, 6))
        if wrap.__name__ == "parallel":  # torch's own trains on GPUs alone
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = wrap(model, x)
        model(x).square().sum().backward()
        return model.eval()(x)

    assert_same_script(script)
