"""What the habits of training scripts share: a table of them, labels, an optimizer and a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


class Habits(dict[str, Callable[[Any, torch.Tensor], Any]]):
    """Code that is given a model and its input, by what it does."""

    def habit(self, name: str) -> Callable[[Any], Any]:
        def note(code: Any) -> Any:
            self[name] = code
            return code

        return note


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
