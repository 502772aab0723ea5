"""What training scripts do with the modules, states and modes of a model: as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from habits.habit import assert_same
from habits.scripts import LABELS, Habits, sgd, step

HABITS = Habits()
habit = HABITS.habit


@pytest.mark.parametrize("name", HABITS)
def test_what_scripts_do_with_modules_is_the_same(name: str) -> None:
    assert_same(HABITS[name])


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
