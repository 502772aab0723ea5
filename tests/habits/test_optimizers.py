"""Optimizers, scalers and averages do for a parallel model what they do for the original."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from habits.habit import (
    Wrap,
    assert_refused,
    assert_same,
    assert_same_script,
    assert_script_refused,
    image,
    net,
)
from shardwise.runtime.optimizer_checks import as_blocks

SPLIT = ["f=2", "random"]  # plans under which ranks hold blocks of weights


def train(model: Any, optimizer: Any, x: torch.Tensor, num_steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("SGD", {"momentum": 0.9, "fused": True}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("Adamax", {}),
        ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        ("RAdam", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("RMSprop", {"foreach": True}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("Rprop", {}),
        ("ASGD", {}),
    ],
)
def test_optimizers_that_update_element_by_element_are_the_same(kind: str, options: Any) -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return train(model, getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options), x)

    assert_same(use, under=["n=2", *SPLIT] if not options else SPLIT)


class ByParameter(torch.optim.Optimizer):
    """An optimizer as people write it: one parameter after the other."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"])

    def update(self, p: Any, lr: float) -> None:
        raise NotImplementedError


class Lamb(ByParameter):
    """As many have written it: the norm of a whole update scales its rate."""

    def update(self, p: Any, lr: float) -> None:
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        moment.lerp_(p.grad, 0.1)
        p.sub_(moment, alpha=float(lr * p.norm() / moment.norm()))


class Noisy(torch.optim.SGD):
    """Draws random numbers of its own."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.01)


class Signs(ByParameter):
    """Nobody here knows of it, and it is right on blocks."""

    def update(self, p: Any, lr: float) -> None:
        p.sub_(p.grad.sign(), alpha=lr)


@pytest.mark.parametrize("kind", [Lamb, Noisy, torch.optim.Adafactor])
def test_optimizers_that_mix_elements_are_refused_by_name_where_weights_are_split(
    kind: Any,
) -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return train(model, kind(model.parameters(), lr=0.01), x)

    sentence = f"^{kind.__name__} does not update every element by itself, and '.*' is split"
    assert_refused(use, sentence, under=SPLIT)
    assert_same(use, under=["n=2", "h=2"])


def test_muon_is_refused_by_name_where_weights_are_split() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return train(model, torch.optim.Muon([model.head.weight], lr=0.01), x)

    assert_refused(use, "^Muon does not update every element by itself", under=SPLIT)
    assert_same(use, under=["n=2", "h=2"])


def test_lbfgs_is_the_same_where_weights_are_whole_and_refused_where_they_are_split() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = model(x).square().mean()
            found.backward()
            return found

        return [optimizer.step(loss) for _ in range(2)]

    assert_same(use, under=["n=2", "h=2"])
    assert_refused(use, "^LBFGS does not update every element by itself", under=SPLIT)


def test_an_optimizer_that_nobody_knows_is_tried_and_used_where_it_is_right() -> None:
    assert_same(lambda model, x: train(model, Signs(model.parameters(), lr=0.01), x))


def test_trying_an_optimizer_draws_no_random_numbers() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        train(model, torch.optim.SGD(model.parameters(), lr=0.123), x, 1)
        return torch.rand(3)

    assert_same(use, under=["f=2"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_made_before_the_model_is_made_parallel_trains_it(kind: Any) -> None:
    def script(wrap: Wrap) -> Any:
        model, x = net(), image()
        optimizer = kind(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model = wrap(model, x)
        losses = train(model, optimizer, x)
        schedule.step()
        return losses, train(model, optimizer, x)

    assert_same_script(script)


def test_what_an_optimizer_kept_before_the_model_was_made_parallel_goes_on() -> None:
    def script(wrap: Wrap) -> Any:
        model, x = net(), image()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        first = train(model, optimizer, x)
        optimizer.zero_grad()
        model = wrap(model, x)
        return first, train(model, optimizer, x)

    assert_same_script(script)


def test_an_optimizer_of_a_model_that_was_made_parallel_twice_is_refused() -> None:
    def script(wrap: Wrap) -> Any:
        model, x = net(), image()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        models = [wrap(model, x), wrap(model, x)]
        for one in models:
            one(x).sum().backward()
        optimizer.step()

    assert_script_refused(script, "made parallel several times", under=["n=2"])


def test_several_optimizers_and_groups_are_the_same() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        head = torch.optim.AdamW(model.head.parameters(), lr=0.01)
        decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "head" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim == 1 and "head" not in n]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        body = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        losses = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            for optimizer in (head, body):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        return losses

    assert_same(use)


def kept(optimizer: Any) -> Any:
    """What an optimizer keeps, through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_what_an_optimizer_keeps_can_be_saved_and_loaded_by_every_rank() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})):
            first = kind(model.parameters(), lr=0.01, **options)
            train(model, first, x)
            second = kind(model.parameters(), lr=0.1, **options)
            second.load_state_dict(kept(first))
            train(model, second, x)
            second.load_state_dict(copy.deepcopy(second.state_dict()))
            train(model, second, x)

    assert_same(use)


def test_what_an_optimizer_of_one_device_kept_can_be_loaded_under_any_plan() -> None:
    def script(wrap: Wrap) -> Any:
        plain, x = net(), image()
        before = torch.optim.Adam(plain.parameters(), lr=0.01)
        train(plain, before, x)
        model = wrap(plain, x)
        after = torch.optim.Adam(model.parameters(), lr=0.01)
        after.load_state_dict(kept(before))
        return train(model, after, x)

    assert_same_script(script)


def test_what_one_rank_has_saved_of_an_optimizer_is_whole_and_loaded_under_any_plan() -> None:
    saved: dict[str, Any] = {}

    def save(model: Any, x: torch.Tensor) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
        train(model, optimizer, x)
        found = kept(optimizer)
        if hasattr(model, "plan") and model.comm.rank == 1:
            saved["rank 1"] = found
        return found

    def load(model: Any, x: torch.Tensor) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
        optimizer.load_state_dict(copy.deepcopy(saved["rank 1"]))
        again = kept(optimizer)
        losses = train(model, optimizer, x)
        return again, losses, kept(optimizer)

    for name in SPLIT:
        assert_same(save, under=[name])
        assert_same(load)


def test_blocks_that_another_rank_or_plan_has_saved_are_refused() -> None:
    saved: dict[str, Any] = {}

    def save(model: Any, x: torch.Tensor) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, x)
        if hasattr(model, "plan") and model.comm.rank == 1:
            with as_blocks():
                saved["rank 1"] = kept(optimizer)

    def load(model: Any, x: torch.Tensor) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if hasattr(model, "plan"):
            optimizer.load_state_dict(saved["rank 1"])
        train(model, optimizer, x)

    sentence = "the optimizer's state is of another rank or plan: of '.*' it has .*, and this rank"
    assert_same(save, under=["f=2"])
    assert_refused(load, sentence, under=["n=2"])
    with pytest.raises(AssertionError, match=f"rank 1: rank 0 failed: {sentence}"):
        assert_refused(load, f"^{sentence}", under=["f=2"])


def test_a_gradient_scaler_scales_clips_and_leaves_out_steps_on_all_ranks() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scales = []
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if step == 1 and (not hasattr(model, "plan") or model.comm.rank == 0):
                model.head.weight.grad.fill_(float("inf"))  # one rank's block alone
            scaler.unscale_(optimizer)
            if step != 1:
                clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.zero_grad()
        return scales

    assert_same(use, under=SPLIT)


def test_averages_of_weights_are_the_same() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        swa = AveragedModel(model)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            train(model, optimizer, x, 1)
            swa.update_parameters(model)
            ema.update_parameters(model)
        update_bn([x, 2 * x], swa)
        swa.eval(), ema.eval()
        return swa(x), ema(x), dict(swa.state_dict()), dict(ema.state_dict())

    assert_same(use)


def test_an_average_written_by_hand_is_the_same() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        teacher = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            with torch.no_grad():
                target = teacher(x)
            loss = nn.functional.mse_loss(model(x), target + 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(other, alpha=0.1)
            losses.append(loss)
        return losses, dict(teacher.state_dict())

    assert_same(use)
