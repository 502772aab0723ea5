"""Hooks run as on one device, or are refused where they would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded
from habits.habit import (
    Wrap,
    assert_refused,
    assert_same,
    assert_same_script,
    assert_script_refused,
    image,
    net,
)
from shardwise import ShardwiseError, capture


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y.square().sum().backward()
    return y


def triple(param: Any) -> None:
    param.grad.mul_(3)


def observe(model: Any) -> list[Any]:
    """Every kind of hook that a whole model has; two of them change what goes through."""
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(kwargs)), with_kwargs=True
    )
    model.register_forward_hook(lambda _, inputs, y: y.tanh())
    model.register_forward_hook(lambda _, inputs, y: seen.append(y.detach().sum()))
    model.register_full_backward_pre_hook(lambda _, gradients: (3 * gradients[0],))
    model.register_full_backward_hook(lambda _, into, out: seen.append(out[0].sum()))
    return seen


def test_hooks_of_the_whole_model_run_whether_set_before_or_after_wrapping() -> None:
    def before(wrap: Wrap) -> Any:
        seen = observe(model := net())
        y = step(wrap(model, image()), image().requires_grad_())
        return y, seen

    def after(model: Any, x: torch.Tensor) -> Any:
        seen = observe(model)
        x.requires_grad_()
        return step(model, x), seen, x.grad

    assert_same_script(before)
    assert_same(after)


def test_hooks_of_tensors_see_what_they_see_on_one_device() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        seen: list[Any] = []
        x.requires_grad_()
        x.register_hook(lambda g: seen.append(g.sum()))
        y = model(x)
        y.register_hook(lambda g: g.clamp(-1, 1))
        y.register_hook(lambda g: seen.append(g.sum()))
        y.retain_grad()
        y.square().sum().backward()
        return seen, y.grad, x.grad

    assert_same(use)


def test_hooks_of_parameters_run_once_on_the_summed_gradient_of_the_block() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        counts = {name: 0 for name, _ in model.named_parameters()}

        def count(name: str, g: torch.Tensor) -> torch.Tensor:
            counts[name] += 1
            return g.clamp(-0.5, 0.5)

        for name, param in model.named_parameters():
            param.register_hook(lambda g, name=name: count(name, g))
            param.register_post_accumulate_grad_hook(triple)
        step(model, x)
        return all(times <= 1 for times in counts.values())  # a rank may have no block

    assert_same(use)


def test_the_optimizer_may_run_in_hooks_of_parameters() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(param: torch.Tensor) -> None:
            steps[param].step()
            steps[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)
        return step(model, x), step(model, x)

    assert_same(use)


def doubled(model: Any) -> None:
    model.second.register_forward_hook(lambda _, inputs, y: 2 * y)


def shifted(model: Any) -> None:
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))


def normalised(model: Any) -> None:
    nn.utils.weight_norm(model.second)


def scaled(model: Any) -> None:
    """As equalised learning rates are often written."""
    weight = model.second.weight
    del model.second._parameters["weight"]
    model.second.register_parameter("weight_orig", nn.Parameter(weight.detach()))
    model.second.register_forward_pre_hook(
        lambda module, _: setattr(module, "weight", module.weight_orig * 0.5)
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("hook", [doubled, shifted, normalised, scaled])
def test_hooks_that_compute_something_are_part_of_the_graph(hook: Any) -> None:
    def script(wrap: Wrap) -> Any:
        hook(model := net())
        return step(wrap(model, image()), image())

    assert_same_script(script, under=["n=2", "f=2"])


LOST: dict[str, tuple[Any, str]] = {
    "forward": (
        lambda model: model.second.register_forward_hook(lambda *_: None),
        "a hook of module 'second' would never run",
    ),
    "pre": (
        lambda model: model.conv.register_forward_pre_hook(lambda *_: None),
        "a hook of module 'conv' would never run",
    ),
    "backward": (
        lambda model: model.head.register_full_backward_hook(lambda *_: None),
        "a hook of module 'head' would never run",
    ),
    "parameter": (
        lambda model: model.head.bias.register_hook(lambda g: 0 * g),
        "a hook of parameter 'head.bias' would be lost: set it on the parameter of the parallel",
    ),
    "accumulated": (
        lambda model: model.head.bias.register_post_accumulate_grad_hook(lambda p: None),
        "a hook of parameter 'head.bias' would be lost",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_hooks_that_would_be_lost_are_refused(name: str) -> None:
    register, sentence = LOST[name]

    def script(wrap: Wrap) -> Any:
        register(model := net())
        return wrap(model, image())

    def after(model: Any, x: torch.Tensor) -> Any:
        register(model)

    assert_script_refused(script, sentence, under=["n=2"])
    if name in ("forward", "pre", "backward"):
        assert_refused(after, sentence, under=["n=2"])


def test_tensors_that_are_trained_and_no_parameters_are_refused() -> None:
    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.code = nn.Conv2d(3, 4, 3), torch.ones(4, 1, 1, requires_grad=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) * self.code.double()

    with pytest.raises(ShardwiseError, match="'code', which requires gradients and is no param"):
        capture(seeded(Latent()), image())
