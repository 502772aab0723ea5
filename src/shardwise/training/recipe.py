"""From settings to an optimizer, LARS among them, and a learning rate for every moment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from math import cos, pi
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.runtime.delayed_optimizer import optimizer
from shardwise.runtime.parallel import ParallelModel, of

from .settings import Settings

Tensors = list[torch.Tensor]
Norms = Callable[[Tensors, Tensors], torch.Tensor]  # of values that lie as their parameters


def make_optimizer(settings: Settings, model: ParallelModel) -> Optimizer:
    """The optimizer of a run; updates of gathered layers hide behind the next forward pass."""
    common = {"lr": peak_rate(settings), "weight_decay": settings.weight_decay}
    shared = settings.shard_state
    if settings.optimizer == "lars":  # it needs the norms of all ranks, so nothing may come later
        own = {"momentum": settings.momentum, "trust": settings.trust, "norms": of(model).norms}
        return optimizer(model, Lars, shard_state=shared, **common, **own)
    if settings.optimizer == "sgd":
        own = {"momentum": settings.momentum, "nesterov": settings.nesterov}
        return optimizer(model, torch.optim.SGD, shard_state=shared, **common, **own)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer]
    return optimizer(model, kind, shard_state=shared, betas=settings.betas, **common)


def peak_rate(settings: Settings) -> float:
    """The highest learning rate: in proportion to the batch, where that is wished for (P2)."""
    return settings.lr * (settings.batch / settings.lr_batch if settings.lr_batch else 1.0)


def rate_at(settings: Settings, epoch: float, epochs: float) -> float:
    """The learning rate when so many of the epochs have passed; parts of epochs count.

    It depends on nothing else, so a run that is resumed goes on with the right one.

    >>> round(rate_at(Settings(lr=0.4, warmup_epochs=5, schedule="step"), epoch=65, epochs=90), 6)
    0.004
    """
    peak = peak_rate(settings)
    if epoch < settings.warmup_epochs:  # from the rate of one small batch up to the highest
        start = settings.lr if settings.lr_batch and peak > settings.lr else 0.0
        return start + (peak - start) * epoch / settings.warmup_epochs
    if settings.schedule == "step":
        return peak * settings.gamma ** bisect_right(sorted(settings.milestones), epoch)
    if settings.schedule == "cosine":
        part = (epoch - settings.warmup_epochs) / max(epochs - settings.warmup_epochs, 1e-9)
        return peak * (1 + cos(pi * min(part, 1.0))) / 2
    return peak


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def local_norms(params: Tensors, values: Tensors) -> torch.Tensor:
    return torch.stack([value.double().norm() for value in values])


class Lars(Optimizer):
    """SGD with momentum, each parameter's rate scaled by the norms of weight and gradient.

    Vectors (biases, and the scales of norms) are updated as SGD does, without weight decay. `norms`
    says how norms are found where a parameter here is a block of one that lies on many ranks.

    >>> Lars([torch.ones(2, 2, requires_grad=True)], lr=0.1).defaults["trust"]
    0.001
    """

    knows_blocks = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        norms: Norms = local_norms,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        scaled = [p for p in group["params"] if p.ndim > 1]
        rates = dict(zip(map(id, scaled), self._rates(group, scaled), strict=True))
        for param in group["params"]:
            gradient, rate = param.grad, rates.get(id(param), 1.0)
            if gradient is None:
                continue
            if id(param) in rates:
                gradient = gradient.add(param, alpha=group["weight_decay"])
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffer = state["momentum_buffer"]
            buffer.mul_(group["momentum"]).add_(gradient, alpha=group["lr"] * rate)
            param.sub_(buffer)

    def _rates(self, group: dict[str, Any], params: Tensors) -> list[float]:
        """trust * |w| / (|g| + decay * |w|); 1 where either is nothing."""
        if not params:
            return []
        # A rank may lack the gradient of what others have a part of; it asks for the norm as well.
        gradients = [p.new_empty(0) if p.grad is None else p.grad for p in params]
        norms = self._norms(params * 2, [*params, *gradients])
        weights, gradients = norms.split(len(params))
        rates = group["trust"] * weights / (gradients + group["weight_decay"] * weights)
        rates[(weights == 0) | (gradients == 0)] = 1.0
        return rates.tolist()
