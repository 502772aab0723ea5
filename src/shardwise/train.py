"""Training the zoo's digits network on scikit-learn's digits, on any number of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn

from shardwise import data, zoo
from shardwise.errors import ShardwiseError
from shardwise.launch import choose_world, init_from_environment, run_local, under_launcher
from shardwise.parallel import ParallelModel, parallelize
from shardwise.plan import Plan
from shardwise.state import ModelGraphs


@dataclass(frozen=True)
class Settings:
    """What a training run is made of; an empty split means the samples over all workers."""

    workers: int = 2
    epochs: int = 10
    batch: int = 64
    lr: float = 0.05
    seed: int = 0
    split: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ShardwiseError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ShardwiseError(f"seed={self.seed} must be from 0 to {2**32 - 1}")
        if not self.lr > 0:
            raise ShardwiseError(f"lr={self.lr} must be above 0")


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to."""

    number: int
    loss: float
    accuracy: float  # on the test samples, 0 to 1
    samples_per_second: float

    def __str__(self) -> str:
        return (
            f"epoch {self.number:3d}  loss {self.loss:.4f}  "
            f"test accuracy {100 * self.accuracy:.2f} %  {self.samples_per_second:.0f} samples/s"
        )


@dataclass(frozen=True)
class Digits:
    """Images Nx1x8x8 in [0, 1] and their labels, for training and for testing."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


def train_digits(settings: Settings) -> list[Epoch]:
    """Trains on local workers, or on those of a launcher, and returns what each epoch came to.

    Under a launcher, rank 0 has the result and the other ranks get an empty list.

    >>> history = train_digits(Settings(workers=2, epochs=10))
    """
    choose_world(settings.workers, settings.split)
    if not under_launcher():
        return run_local(_train, settings.workers, settings)[0]
    device = init_from_environment()
    history = _train(settings, device)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return history if first else []


def load_digits() -> Digits:
    """scikit-learn's 1797 digits, always split in the same way."""
    return Digits(*_tensors(data.digits("train")), *_tensors(data.digits("test")))


def _tensors(source: data.Source) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a small source, and their labels."""
    numbers = range(len(source))
    images = np.stack([source.read(number) for number in numbers])
    x = torch.from_numpy(images).float() * source.scale
    return x, torch.tensor([source.label(number) for number in numbers])


# -- on every rank ---------------------------------------------------------------------------------


def _train(settings: Settings, device: torch.device | str = "cpu") -> list[Epoch]:
    """Every rank sees the global batch and the whole output, so this reads as on one device."""
    digits = load_digits()
    model = _parallel_model(settings, device)
    optimizer = torch.optim.SGD(
        model.parameters(), settings.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    history = []
    with _progress() as progress:
        progress.console.print(_headline(settings), soft_wrap=True)
        for number in range(1, settings.epochs + 1):
            order = torch.from_numpy(data.shuffled(len(digits.train_x), settings.seed, number))
            batches = order.split(settings.batch)
            task = progress.add_task(f"epoch {number}", total=len(batches))
            start = time.perf_counter()
            step_done = partial(progress.advance, task)
            loss = _train_epoch(model, optimizer, digits, batches, step_done)
            seconds = time.perf_counter() - start
            schedule.step()
            progress.remove_task(task)
            accuracy = _accuracy(model, digits.test_x, digits.test_y)
            history.append(Epoch(number, loss, accuracy, len(order) / seconds))
            progress.console.print(str(history[-1]), soft_wrap=True)
    return history


def _parallel_model(settings: Settings, device: torch.device | str) -> ParallelModel:
    torch.manual_seed(settings.seed)
    model = zoo.build("digits").to(device)
    graphs = ModelGraphs(model, (zoo.input_shape("digits", settings.batch),))
    graph = graphs(True, settings.batch)
    split = settings.split or {"n": settings.workers}
    plan = Plan.uniform(graph, world=settings.workers, **split)
    return parallelize(model, plan, graphs=graphs)


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    batches: tuple[torch.Tensor, ...],
    step_done: Callable[[], None],
) -> float:
    """One pass over the training samples; returns their mean loss."""
    model.train()
    device = next(model.parameters()).device
    total = 0.0
    for indices in batches:
        x, y = digits.train_x[indices].to(device), digits.train_y[indices].to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(indices)
        step_done()
    return total / len(digits.train_x)


@torch.no_grad()
def _accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    device = next(model.parameters()).device
    return (model(x.to(device)).argmax(1).cpu() == y).double().mean().item()


# -- on the terminal -------------------------------------------------------------------------------


def _progress() -> Progress:
    """A progress bar on rank 0; plain lines only where there is no terminal; else silent."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not first, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _headline(settings: Settings) -> str:
    split = settings.split or {"n": settings.workers}
    text = ",".join(f"{axis}={degree}" for axis, degree in split.items())
    return f"digits on {settings.workers} workers, split {text}, batches of {settings.batch}"
