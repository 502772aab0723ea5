"""From settings to an optimizer, a learning rate for every moment, and a loss."""

from __future__ import annotations

from bisect import bisect_right
from math import cos, pi

import torch
from torch.optim import Optimizer

from shardwise.runtime.delayed_optimizer import optimizer
from shardwise.runtime.parallel import ParallelModel, of

from .lars import Lars
from .settings import Settings


def make_optimizer(settings: Settings, model: ParallelModel) -> Optimizer:
    """The optimizer of a run; updates of gathered layers hide behind the next forward pass."""
    common = {"lr": peak_rate(settings), "weight_decay": settings.weight_decay}
    if settings.optimizer == "lars":  # it needs the norms of all ranks, so nothing may come later
        own = {"momentum": settings.momentum, "trust": settings.trust, "norms": of(model).norms}
        return Lars(model.parameters(), **common, **own)
    if settings.optimizer == "sgd":
        own = {"momentum": settings.momentum, "nesterov": settings.nesterov}
        return optimizer(model, torch.optim.SGD, **common, **own)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer]
    return optimizer(model, kind, betas=settings.betas, **common)


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
