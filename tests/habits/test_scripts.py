"""What training scripts do around a model, from one to the next: the same as on one device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from habits.habit import assert_same
from habits.scripts import LABELS, Habits, sgd, step

HABITS = Habits()
habit = HABITS.habit


@pytest.mark.parametrize("name", HABITS)
def test_what_training_scripts_do_is_the_same(name: str) -> None:
    assert_same(HABITS[name])


# -- batches and losses ----------------------------------------------------------------------------


@habit("mixup")
def mixup(model: Any, x: torch.Tensor) -> Any:
    optimizer, losses = sgd(model), []
    for _ in range(2):
        share, order = torch.rand(()).item(), torch.randperm(len(x))
        y = model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(y, LABELS) + (1 - share) * F.cross_entropy(y, LABELS[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


@habit("label smoothing")
def smoothing(model: Any, x: torch.Tensor) -> Any:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.ones(4, dtype=x.dtype))
    found = loss(model(x), LABELS)
    found.backward()
    return found


@habit("a small last batch")
def small_batches(model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model)
    return [step(model, x[:size], optimizer) for size in (4, 3, 2, 4, 2)]


@habit("a batch of one, evaluated")
def one_sample(model: Any, x: torch.Tensor) -> Any:
    return model.eval()(x[:1]), model(x[1:2])


@habit("a batch of one in training, batch norms frozen")
def one_sample_trained(model: Any, x: torch.Tensor) -> Any:
    model.norm.eval()
    return step(model, x[:1], sgd(model))


@habit("larger batches in evaluation")
def larger_batches(model: Any, x: torch.Tensor) -> Any:
    step(model, x, sgd(model))
    with torch.no_grad():
        return model.eval()(torch.cat([x, x + 1, x[:1]]))


@habit("images of several sizes")
def several_sizes(model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model)
    sizes = [tuple(x.shape[2:]), (11, 5), (6, 9)]
    return [step(model, F.interpolate(x, size), optimizer) for size in sizes]


@habit("evaluation before the first step")
def evaluation_first(model: Any, x: torch.Tensor) -> Any:
    model.eval()
    with torch.no_grad():
        before = model(x)
    model.train()
    return before, step(model, x, sgd(model)), model.eval()(x)


@habit("channels_last")
def channels_last(model: Any, x: torch.Tensor) -> Any:
    model = model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    optimizer = sgd(model)
    return step(model, x, optimizer), step(model, x, optimizer)


@habit("accumulation of loss / k")
def accumulation(model: Any, x: torch.Tensor) -> Any:
    optimizer, losses = sgd(model), []
    for index, part in enumerate([x[:2], x[2:], x[1:3], x[:2]]):
        loss = F.cross_entropy(model(part), LABELS[: len(part)]) / 2
        loss.backward()
        losses.append(loss)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@habit("several losses of one output")
def several_losses(model: Any, x: torch.Tensor) -> Any:
    y = model(x)
    loss = F.cross_entropy(y, LABELS) + 0.1 * y.abs().mean() + 0.01 * torch.logsumexp(y, 1).mean()
    loss.backward()
    return loss


@habit("two forward passes, one backward (siamese)")
def siamese(model: Any, x: torch.Tensor) -> Any:
    first, second, third = model(x), model(x + 0.1), model(-x)
    loss = F.triplet_margin_loss(first, second, third)
    loss.backward()
    return loss, F.cosine_similarity(first, second)


@habit("contrastive losses over all samples")
def contrastive(model: Any, x: torch.Tensor) -> Any:
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x.flip(3)), dim=1)
    loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))
    loss.backward()
    return loss


@habit("a loss that is weighted per sample")
def per_sample(model: Any, x: torch.Tensor) -> Any:
    losses = F.cross_entropy(model(x), LABELS, reduction="none")
    losses.topk(2).values.mean().backward()  # hard examples only
    return losses


@habit("losses with parameters of their own (center loss, temperature)")
def learned_loss(model: Any, x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    centers = nn.Parameter(torch.randn(4, 4, dtype=x.dtype))
    temperature = nn.Parameter(torch.ones((), dtype=x.dtype))
    optimizer = torch.optim.AdamW([*model.parameters(), centers, temperature], lr=0.01)
    losses = []
    for _ in range(3):
        y = model(x)
        loss = F.cross_entropy(y * temperature.exp(), LABELS) + F.mse_loss(y, centers[LABELS])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, centers, temperature


@habit("detaching a part of the loss")
def detached(model: Any, x: torch.Tensor) -> Any:
    y = model(x)
    loss = F.mse_loss(y, y.detach() + 1) + (y[:2].detach() * y[2:]).sum()
    loss.backward()
    return loss


@habit("a distilled teacher on one device")
def distilled(model: Any, x: torch.Tensor) -> Any:
    torch.manual_seed(5)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).to(x.dtype).eval()
    with torch.no_grad():
        soft = teacher(x).softmax(1)
    loss = F.kl_div(model(x).log_softmax(1), soft, reduction="batchmean")
    loss.backward()
    return loss


@habit("layers before and after the parallel model")
def layers_around(model: Any, x: torch.Tensor) -> Any:
    torch.manual_seed(5)
    before, after = nn.Conv2d(3, 3, 1).to(x.dtype), nn.Linear(4, 2).to(x.dtype)
    params = itertools.chain(before.parameters(), model.parameters(), after.parameters())
    optimizer = torch.optim.Adam(params, lr=0.01)
    losses = []
    for _ in range(2):
        loss = after(model(before(x))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, before.weight, after.weight


@habit("saliency: the gradient of the input")
def saliency(model: Any, x: torch.Tensor) -> Any:
    x.requires_grad_()
    model.eval()(x).max(1).values.sum().backward()
    model.zero_grad()
    return x.grad


@habit("adversarial training (FGSM, PGD)")
def adversarial(model: Any, x: torch.Tensor) -> Any:
    optimizer, shift = sgd(model), torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        loss = F.cross_entropy(model(x + shift), LABELS)
        (gradient,) = torch.autograd.grad(loss, shift)
        shift = (shift + 0.1 * gradient.sign()).clamp(-0.2, 0.2).detach().requires_grad_()
    return step(model, (x + shift).detach(), optimizer)


@habit("an input that is optimized")
def optimized_input(model: Any, x: torch.Tensor) -> Any:
    model.eval().requires_grad_(False)
    x = x.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x)[:, 0].sum().neg().backward()
        optimizer.step()
    return x


# -- parameters and groups -------------------------------------------------------------------------


@habit("a backbone that is frozen and unfrozen")
def unfreezing(model: Any, x: torch.Tensor) -> Any:
    for param in [*model.conv.parameters(), *model.norm.parameters()]:
        param.requires_grad = False
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = [step(model, x, optimizer)]
    for param in model.parameters():
        param.requires_grad_(True)
    optimizer.add_param_group({"params": [*model.conv.parameters()], "lr": 0.01})
    return [*losses, step(model, x, optimizer), step(model, x, optimizer)]


@habit("only biases trained")
def only_biases(model: Any, x: torch.Tensor) -> Any:
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    return step(model, x, sgd(model)), [p.requires_grad for p in model.parameters()]


@habit("rates by names of parameters")
def discriminative(model: Any, x: torch.Tensor) -> Any:
    groups = [
        {"params": [p], "lr": 0.1 * 0.5**depth, "name": name}
        for depth, (name, p) in enumerate(model.named_parameters())
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return step(model, x, optimizer), step(model, x, optimizer), [g["name"] for g in groups]


@habit("weight decay by the number of dims")
def decayed(model: Any, x: torch.Tensor) -> Any:
    flat = [p for p in model.parameters() if p.ndim < 2]
    deep = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": deep}, {"params": flat, "weight_decay": 0}], lr=0.01)
    return step(model, x, optimizer), step(model, x, optimizer), len(flat), len(deep)


@habit("weight decay by types of modules")
def decayed_by_type(model: Any, x: torch.Tensor) -> Any:
    norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    others = [p for p in model.parameters() if not any(p is q for q in norms)]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": norms, "weight_decay": 0}])
    return step(model, x, optimizer), len(norms)


@habit("zero_grad(set_to_none=False)")
def zeroed(model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), LABELS).backward()
        optimizer.step()
    model.zero_grad(set_to_none=False)
    return all(not p.grad.any() for p in model.parameters())


@habit("gradients set to None by hand")
def cleared(model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model)
    for _ in range(2):
        F.cross_entropy(model(x), LABELS).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None


@habit("gradients changed by hand")
def changed_gradients(model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model)
    F.cross_entropy(model(x), LABELS).backward()
    for param in model.parameters():
        param.grad.mul_(0.5).clamp_(-0.1, 0.1)
        param.grad = param.grad + 0.01 * param.detach()
    optimizer.step()
    optimizer.zero_grad()


@habit("weights changed by hand")
def changed_weights(model: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9).clamp_(-0.2, 0.2)
        model.head.bias.fill_(0.5)
        model.conv.weight.copy_(model.conv.weight * 2)
    first = model(x)
    for param in model.parameters():
        param.data = param.data * 0.5
        param.data.add_(0.01)
    return first, model(x)


@habit("an LR finder that puts everything back")
def lr_finder(model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = []
    for exponent in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 10**exponent
        losses.append(step(model, x, optimizer).item())
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return losses, step(model, x, optimizer)


@habit("early stopping puts the best weights back")
def early_stopping(model: Any, x: torch.Tensor) -> Any:
    optimizer, best, state = sgd(model, lr=2.0), float("inf"), {}
    for _ in range(3):
        loss = step(model, x, optimizer).item()
        if loss < best:
            best, state = loss, {name: v.clone() for name, v in model.state_dict().items()}
    model.load_state_dict(state)
    return best, model.eval()(x)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "cosine with restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "warm-up, then cosine (SequentialLR)": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)],
        [2],
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
}


def scheduled(make: Callable[[Any], Any], model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model)
    schedule, losses = make(optimizer), []
    for _ in range(4):
        losses.append(step(model, x, optimizer))
        schedule.step()
    return losses, schedule.get_last_lr()


for _name, _make in SCHEDULES.items():
    HABITS[_name] = lambda model, x, make=_make: scheduled(make, model, x)


@habit("ReduceLROnPlateau")
def plateau(model: Any, x: torch.Tensor) -> Any:
    optimizer = sgd(model, lr=0.5)
    schedule, rates = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5), []
    for _ in range(4):
        schedule.step(step(model, x, optimizer).item())
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_another_default_dtype_changes_nothing() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(lambda model, x: step(model, x, sgd(model)), under=["random"])
    finally:
        torch.set_default_dtype(before)


def test_backward_to_some_parameters_is_the_same() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        x.requires_grad_()
        loss = F.cross_entropy(model(x), LABELS)
        loss.backward(inputs=[x, *model.head.parameters()])
        return x.grad

    assert_same(use)
