"""A model of several parts, of which any may be made parallel, beside the same on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Config, Plan, capture

SHAPE = (2, 3, 6, 5)


class Pipe(nn.Module):
    """An encoder, two decoders and a head, of which any may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3)
        )
        self.refiner = nn.Sequential(nn.Conv2d(5, 6, 1), nn.GELU(), nn.Conv2d(6, 4, 3, padding=1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.refiner(self.decoder(self.encoder(x))).mean((2, 3)))


FEATURES = {"decoder": (2, 4, 6, 5), "refiner": (2, 5, 4, 3)}


def new_pipe(seed: int = 0) -> Any:
    return seeded(Pipe(), seed)


def plan_of(pipe: Any, name: str, workers: int = 2, **split: int) -> Plan:
    module = getattr(pipe, name)
    graph = capture(module, torch.zeros(FEATURES[name], dtype=torch.float64))
    if split:
        return Plan.uniform(graph, workers, **split)
    return Plan.make(graph, workers, lambda la: Config(f=workers) if la.params else Config(n=1))


def step(pipe: Any, optimizer: torch.optim.Optimizer, number: int, clip: float = 0.0) -> Any:
    """One step; the output and the gradient of the input."""
    x = seeded_input(SHAPE, number).requires_grad_()
    optimizer.zero_grad()
    y = pipe(x)
    y.square().mean().backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), clip)
    optimizer.step()
    return y.detach(), x.grad


def sgd(pipe: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)


def difference(found: Any, alone: Any) -> str:
    for name, one, other in zip(("output", "input's gradient"), found, alone, strict=True):
        if not torch.allclose(one, other, rtol=1e-9, atol=1e-11):
            return f"the {name} is off by {(one - other).abs().max():.2e}"
    return ""


class Run:
    """The training of a pipe, of which parts are parallel, beside one on one device."""

    def __init__(self, pipe: Any, seed: int, clip: float = 0.0) -> None:
        self.pipes, self.clip, self.number = (pipe, new_pipe(seed)), clip, 0
        self.optimizers = [sgd(own) for own in self.pipes]
        self.wrong: list[str] = []

    def step(self) -> None:
        both = zip(self.pipes, self.optimizers, strict=True)
        found = [step(*own, self.number, self.clip) for own in both]
        self.wrong += filter(None, [difference(*found)])
        self.number += 1

    def finish(self) -> list[str]:
        """What was different, and which weights are."""
        whole, alone = (own.state_dict() for own in self.pipes)
        for name, tensor in alone.items():
            if not torch.allclose(whole[name], tensor, rtol=1e-9, atol=1e-11):
                self.wrong.append(f"{name} is off by {(whole[name] - tensor).abs().max():.2e}")
        return self.wrong


def trained(pipe: Any, seed: int, steps: int, clip: float = 0.0) -> list[str]:
    run = Run(pipe, seed, clip)
    for _ in range(steps):
        run.step()
    return run.finish()
