"""A pass leaves nothing behind, and what is kept for later passes has a bound."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4),
        nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5),
    )  # fmt: skip


def alone(plain: nn.Module, x: torch.Tensor) -> Any:
    return parallelize(plain, Plan.uniform(capture(plain, x)))


def num_elements() -> int:
    """Of all tensors that are alive."""
    gc.collect()
    return sum(t.numel() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))


def test_a_forward_pass_that_nobody_goes_back_through_leaves_nothing() -> None:
    model, x = alone(seeded(net()), seeded_input((2, 3, 8, 8))), seeded_input((2, 3, 8, 8))
    with torch.no_grad():
        model(x)
    before = num_elements()
    gc.disable()
    try:
        y = model(x)
        node = weakref.ref(y.grad_fn)
        del y
        assert node() is None  # at once, without a collector of cycles
    finally:
        gc.enable()
    assert num_elements() == before


def saved(model: Any, x: torch.Tensor) -> int:
    """How many elements a forward pass keeps for the backward pass."""
    model(x)
    kept: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model(x)
    return sum(kept.values())


def test_frozen_layers_keep_nothing_for_the_backward_pass() -> None:
    plain, x = seeded(net()), seeded_input((2, 3, 8, 8))
    for layer in plain[:4]:
        layer.requires_grad_(False)
    assert saved(alone(plain, x), x) == saved(plain, x)


def test_programs_of_many_batch_sizes_do_not_pile_up() -> None:
    def work(comm: Communicator) -> list[int]:
        plain, x = seeded(net()), seeded_input((8, 3, 8, 8))
        model: Any = parallelize(plain, Plan.uniform(capture(plain, x), n=2), comm=comm)
        alive = []
        for step in range(60):
            model.train(step % 3 > 0)
            model.zero_grad()
            model(seeded_input((1 + step % 25, 3, 8, 8))).sum().backward()
            if step in (30, 59):
                gc.collect()
                alive.append(model._shardwise.programs.num_kept)
        return alive

    assert World(2).run(work) == [[8, 8], [8, 8]]
