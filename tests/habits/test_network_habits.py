"""What networks are built of, and how several of them are trained together."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import fuse_conv_bn_eval, parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from exactness import seeded, seeded_input
from habits.habit import (
    Net,
    Wrap,
    assert_refused,
    assert_same,
    assert_same_script,
    assert_script_refused,
    image,
    net,
)

SPLIT = ["f=2", "random"]


def conv(inputs: int = 3, outputs: int = 6) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Lists(nn.Module):
    """Parameters in lists and dicts, and modules in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv()
        self.scales = nn.ParameterList([torch.full((6, 1, 1), 0.5 + i) for i in range(2)])
        self.shifts = nn.ParameterDict({"a": torch.ones(6, 1, 1), "b": torch.zeros(1)})
        self.blocks = nn.ModuleList([conv(6), conv(6)])
        self.heads = nn.ModuleDict({"cls": nn.Linear(6, 4), "box": nn.Linear(6, 2)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + torch.relu(block(x)) * scale + self.shifts["a"] * self.shifts["b"]
        return {name: head(x.mean((2, 3))) for name, head in self.heads.items()}


class Tied(nn.Module):
    """Weights that two layers have in common, a layer that runs twice, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = conv(), conv(6), conv(6)
        self.two.weight = self.one.weight
        self.embed = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(self.first(x)))
        x = (
            torch.relu(self.two(x))
            + self.one(x)
            + F.conv2d(x, self.first.weight.sum(1, True), None, 1, 1, 1, 6)
        )
        code = self.embed(x.mean((2, 3)))
        return torch.cat([code, F.linear(code, self.embed.weight.t())], 1)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            conv(), nn.Dropout2d(0.3), nn.ReLU(True), conv(6), nn.Dropout(0.5)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(self.layers(x).mean((2, 3)), 0.2, self.training))


class Untracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(), nn.BatchNorm2d(6, track_running_stats=False)
        self.plain, self.cumulative = (
            nn.BatchNorm2d(6, affine=False),
            nn.BatchNorm2d(6, momentum=None),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cumulative(torch.relu(self.plain(torch.relu(self.norm(self.conv(x))))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stages = conv(), nn.Sequential(conv(6), nn.ReLU(), conv(6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.stem, x, use_reentrant=False)  # type: ignore[assignment]
        return checkpoint_sequential(self.stages, 2, x, use_reentrant=False)


class Depth(nn.Module):
    """Layers that only some calls use: auxiliary heads in training, as Inception's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aux, self.head = conv(), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.first(x))
        out = self.head(y.mean((2, 3)))
        return (out, self.aux(y.amax((2, 3)))) if self.training else out


class Loss(nn.Module):
    """A model that is given labels and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def total(y: Any) -> torch.Tensor:
    if isinstance(y, torch.Tensor):
        return y.square().mean()
    return sum(total(own) for own in (y.values() if isinstance(y, dict) else y))  # type: ignore[return-value]


def train(model: Any, x: torch.Tensor) -> Any:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = total(model(x))
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, model.eval()(x), model(x[:3])


KINDS = [Lists, Tied, Dropping, Untracked, Checkpointed, Depth]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_networks_of_all_kinds_train_as_on_one_device(kind: Any) -> None:
    assert_same(train, lambda: seeded(kind()))


def labelled() -> tuple[torch.Tensor, ...]:
    return seeded_input((4, 3, 6, 6)), torch.tensor([1, 0, 3, 2])


def test_a_model_that_returns_its_loss_is_given_inputs_by_name() -> None:
    def use(model: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        found = model(labels=labels, pixels=x)
        found["loss"].backward()
        return found

    assert_same(use, lambda: seeded(Loss()), labelled)


def test_a_generator_and_a_discriminator_are_trained_in_turn() -> None:
    def script(wrap: Wrap) -> Any:
        x = image()
        noise = seeded_input((4, 2, 3, 3), seed=2)
        made = nn.Sequential(nn.ConvTranspose2d(2, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 3, 1))
        generator = wrap(seeded(made), noise)
        critic = wrap(seeded(nn.Sequential(conv(), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3))), x)
        ours = torch.optim.Adam(generator.parameters(), 1e-2, betas=(0.5, 0.9))
        theirs = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.5, 0.9))
        losses = []
        for _ in range(2):
            fake = generator(noise)
            theirs.zero_grad()
            loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
            loss.backward()
            theirs.step()
            ours.zero_grad()
            other = F.softplus(-critic(fake)).mean()
            other.backward()
            ours.step()
            losses += [loss, other]
        return losses, generator.eval()(noise)

    assert_same_script(script)


def test_a_teacher_that_is_parallel_too_follows_the_student() -> None:
    def script(wrap: Wrap) -> Any:
        x = image()
        student, teacher = wrap(net(), x), wrap(net(), x)
        teacher.requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
        losses = []
        for _ in range(2):
            with torch.no_grad():
                target = teacher(x + 0.1)
            loss = F.mse_loss(student(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, own in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(own, 0.1)
            losses.append(loss)
        teacher.load_state_dict(student.state_dict())
        return losses

    assert_same_script(script)


def test_only_a_part_of_a_model_may_be_parallel() -> None:
    def script(wrap: Wrap) -> Any:
        x = image()
        whole = seeded(
            nn.Sequential(OrderedDict(stem=conv(3, 3), body=net(), head=nn.Linear(4, 2)))
        )
        whole.body = wrap(whole.body, x)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = whole(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            optimizer.step()
            losses.append(loss)
        return losses, dict(whole.state_dict()), copy.deepcopy(whole).eval()(x)

    assert_same_script(script)


def test_a_parallel_model_within_another_is_not_made_parallel_again() -> None:
    def script(wrap: Wrap) -> Any:
        inner = wrap(net(), image())
        return wrap(nn.Sequential(inner, nn.ReLU()), image())(image())

    assert_script_refused(script, "cannot be made parallel: its module '0' is parallel already")


def test_all_parameters_may_be_one_vector_where_they_are_whole() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        vector = parameters_to_vector(model.parameters())
        with torch.no_grad():
            vector_to_parameters(vector * 0.5, model.parameters())
        return vector, model(x)

    assert_same(use, under=["n=2", "h=2"])
    assert_refused(use, "would be that of one rank's block", under=["f=2", "random"])


def test_a_convolution_and_its_norm_are_fused_before_wrapping() -> None:
    def script(wrap: Wrap) -> Any:
        model: Any = net().eval()
        model.conv = fuse_conv_bn_eval(model.conv, model.norm)
        model.norm = nn.Identity()
        return wrap(model, image())(image())

    assert_same_script(script)


def test_fusing_after_wrapping_is_refused() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        model.eval()
        model.conv = fuse_conv_bn_eval(model.conv, model.norm)

    assert_refused(use, "the model is parallel: change the modules of the original", under=["n=2"])


def test_half_of_the_precision_is_that_of_all_parameters() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        model = model.bfloat16().eval()
        y = model(x.bfloat16())
        return y.dtype == torch.bfloat16, model.conv.weight.dtype == torch.bfloat16

    assert_same(use)


def test_memory_may_be_shared() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return model.share_memory()(x)

    assert_same(use)


def test_modules_that_are_printed_counted_and_compared() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        kinds = [type(m).__name__.removeprefix("Parallel") for m in model.modules()]
        lines = str(model).removeprefix("Parallel").splitlines()
        return kinds, lines, model == model, len({model, model}), isinstance(model, Net)

    assert_same(use)


def test_new_modules_and_parameters_after_wrapping_are_refused() -> None:
    def module(model: Any, x: torch.Tensor) -> Any:
        model.add_module("extra", nn.Linear(4, 4))

    def parameter(model: Any, x: torch.Tensor) -> Any:
        model.head.bias = nn.Parameter(torch.zeros(4, dtype=x.dtype))
        return model(x)

    assert_refused(module, "the model is parallel: change the modules of the original")
    sentence = "the model has parameters of other shapes than before: 'head.bias' is 4, and"
    assert_refused(parameter, sentence, under=["f=2"])
    assert_same(parameter, under=["n=2", "h=2"])


def test_exporting_or_tracing_a_parallel_model_is_refused() -> None:
    def export(model: Any, x: torch.Tensor) -> Any:
        torch.export.export(model, (x,))

    def trace(model: Any, x: torch.Tensor) -> Any:
        torch.jit.trace(model, (x,), check_trace=False)

    sentence = "cannot be exported or traced: .*export the original"
    assert_refused(export, sentence, under=["n=2"])
    assert_refused(trace, sentence, under=["n=2"])
