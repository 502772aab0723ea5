"""A small network whose training the tests of gradient sums compare."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Engine, Plan, capture, parallelize

STEPS = 8
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.05, nesterov=True),
    "adam": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """Convolutions, a norm, and a linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 5, 3, padding=1)
        self.twice = nn.Linear(5, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(self.norm(self.conv1(x)).relu()).mean((2, 3))
        return self.head(self.twice(self.twice(x).tanh()).tanh())


def train(model: nn.Module, optimizer: str, steps: int, accumulate: bool = False) -> nn.Module:
    x, y = seeded_input((8, 3, 8, 7)), torch.arange(8) % 4
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        nn.functional.cross_entropy(model(x + 0.1 * step), y).backward()
        if not accumulate or step % 2:
            stepper.step()
            stepper.zero_grad(set_to_none=step % 3 == 0)
    return model


def weights_of(
    engine: Engine, splits: list[dict[str, int]], optimizer: str, accumulate: bool = False
) -> Any:
    plain = seeded(Net())
    graph = capture(plain, seeded_input((8, 3, 8, 7)))
    found = []
    for split in splits:
        model = parallelize(plain, Plan.uniform(graph, 4, **split), gradients=engine)
        found.append(train(model, optimizer, STEPS, accumulate).state_dict())
    return found
