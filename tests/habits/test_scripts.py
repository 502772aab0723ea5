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

HABITS: dict[str, Callable[[Any, torch.Tensor], Any]] = {}


def habit(name: str) -> Callable[[Any], Any]:
    def note(code: Any) -> Any:
        HABITS[name] = code
        return code

    return note


@pytest.mark.parametrize("name", HABITS)
def test_what_training_scripts_do_is_the_same(name: str) -> None:
    assert_same(HABITS[name])


LABELS = torch.tensor([1, 0, 3, 2])


def sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    settings: Any = {"lr": 0.05, "momentum": 0.9} | options
    return torch.optim.SGD(model.parameters(), **settings)


def step(model: Any, x: torch.Tensor, optimizer: Any, y: torch.Tensor = LABELS) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y[: len(x)])
    loss.backward()
    optimizer.step()
    return loss


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


# -- modules and modes -----------------------------------------------------------------------------


@habit("model.apply")
def applied(model: Any, x: torch.Tensor) -> Any:
    def change(module: nn.Module) -> None:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 0.5)
            module.momentum = 0.3
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    return model.apply(change) is model, step(model, x, sgd(model)), model.eval()(x)


@habit("named_modules, get_submodule, get_parameter")
def looked_up(model: Any, x: torch.Tensor) -> Any:
    assert model.get_submodule("norm") is model.norm
    assert model.get_parameter("head.bias") is model.head.bias
    assert model.get_buffer("norm.running_mean") is model.norm.running_mean
    return (
        [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        [name for name, _ in model.named_children()],
    )


@habit("the order and the names of state_dict")
def keys(model: Any, x: torch.Tensor) -> Any:
    state = model.state_dict(prefix="model.")
    return list(model.state_dict()), list(state), [tuple(v.shape) for v in state.values()]


@habit("load_state_dict(strict=False)")
def loaded_in_part(model: Any, x: torch.Tensor) -> Any:
    state = {k: v * 0.5 for k, v in model.state_dict().items() if v.is_floating_point()}
    del state["head.weight"]
    state["new.weight"] = torch.ones(2)
    found = model.load_state_dict(state, strict=False)
    return sorted(found.missing_keys), sorted(found.unexpected_keys), model(x)


@habit("a head of another size is left out of what is loaded")
def loaded_by_shape(model: Any, x: torch.Tensor) -> Any:
    state = {k: v * 0.5 for k, v in model.state_dict().items()}
    state["head.weight"] = torch.ones(7, 6, dtype=x.dtype)
    own = model.state_dict()
    fits = {k: v for k, v in state.items() if v.shape == own[k].shape}
    model.load_state_dict(fits, strict=False)
    return len(fits), model(x)


@habit("no_grad and inference_mode predictions")
def predictions(model: Any, x: torch.Tensor) -> Any:
    step(model, x, sgd(model))
    model.eval()
    with torch.no_grad():
        first = model(x)
    with torch.inference_mode():
        second = model(x[:3])
    model.train()
    return first, second.clone(), step(model, x, sgd(model)), first.requires_grad


@habit("statistics reset (reset_running_stats)")
def reset(model: Any, x: torch.Tensor) -> Any:
    step(model, x, sgd(model))
    model.norm.reset_running_stats()
    return model.eval()(x), model.train()(x), model.eval()(x)


@habit("buffers changed by hand")
def changed_buffers(model: Any, x: torch.Tensor) -> Any:
    model.norm.running_mean.fill_(0.1)
    model.norm.running_var.mul_(2)
    with torch.no_grad():
        model.norm.running_mean += 0.05
    return model.eval()(x)


@habit("momentum=None of batch norms")
def cumulative(model: Any, x: torch.Tensor) -> Any:
    model.norm.momentum = None
    model.norm.reset_running_stats()
    for batch in (x, x[:3] + 1, x - 1):
        model(batch)
    return model.eval()(x)


@habit("batch norms in eval mode while the model trains")
def frozen_norms(model: Any, x: torch.Tensor) -> Any:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return step(model, x, sgd(model)), step(model, x, sgd(model)), model.norm.training


@habit("a buffer registered after wrapping")
def registered(model: Any, x: torch.Tensor) -> Any:
    model.register_buffer("steps", torch.zeros((), dtype=torch.long))
    model.norm.register_buffer("extra", torch.ones(2), persistent=False)
    loss = step(model, x, sgd(model))
    model.steps += 1
    return loss, model.steps, list(model.state_dict())


@habit("model.to(device)")
def moved(model: Any, x: torch.Tensor) -> Any:
    model = model.to("cpu").to(torch.device("cpu")).cpu()
    return step(model, x, sgd(model))


@habit("the model inside of another module")
def contained(model: Any, x: torch.Tensor) -> Any:
    class Task(nn.Module):
        """As Lightning's modules are."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = model, nn.CrossEntropyLoss()
            torch.manual_seed(5)
            self.scale = nn.Parameter(torch.ones(4, dtype=x.dtype))

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self.loss(self.model(x) * self.scale, LABELS)

    task = Task()
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        loss = task.train().training_step(x)
        task.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 0.1)
        optimizer.step()
        losses.append(loss)
    state = copy.deepcopy(task.state_dict())
    task.load_state_dict(state)
    return losses, dict(state), task.eval().training_step(x)


@habit("metrics of the output")
def metrics(model: Any, x: torch.Tensor) -> Any:
    y = model.eval()(x)
    right = (y.argmax(1) == LABELS).sum().item()
    confusion = torch.zeros(4, 4, dtype=torch.long)
    for truth, guess in zip(LABELS.tolist(), y.argmax(1).tolist(), strict=True):
        confusion[truth, guess] += 1
    return right, confusion, y.topk(2).indices, y.detach().numpy().round(9).tolist()


@habit("anomaly detection")
def anomaly(model: Any, x: torch.Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return step(model, x, sgd(model))


@habit("a DataLoader that shuffles")
def loader(model: Any, x: torch.Tensor) -> Any:
    data = torch.utils.data.TensorDataset(torch.cat([x, -x]), torch.cat([LABELS, LABELS]))
    batches = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
    optimizer = sgd(model)
    return [step(model, inputs, optimizer, y) for _ in range(2) for inputs, y in batches]


@habit("random augmentation of the global batch")
def augmented(model: Any, x: torch.Tensor) -> Any:
    optimizer, losses = sgd(model), []
    for _ in range(2):
        flipped = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
        losses.append(step(model, flipped + 0.1 * torch.randn_like(x), optimizer))
    return losses


@habit("a batch scattered and gathered by hand")
def scattered(model: Any, x: torch.Tensor) -> Any:
    model.eval()
    return torch.cat([model(part) for part in x.chunk(2)]), model(x)


@habit("test-time augmentation")
def averaged_views(model: Any, x: torch.Tensor) -> Any:
    model.eval()
    with torch.no_grad():
        return torch.stack([model(view).softmax(1) for view in (x, x.flip(3), x.flip(2))]).mean(0)


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
