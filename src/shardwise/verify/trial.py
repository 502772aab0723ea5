"""What is done with a model, and every tensor that it leaves to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.modules import named_tensors
from shardwise.runtime.parallel import ParallelModel, of
from shardwise.verify.comparison import Key, is_inexact

Found = dict[Key, Any]


@dataclass(frozen=True)
class Trial:
    """Some steps of training on these inputs, or one evaluation of them."""

    inputs: tuple[torch.Tensor, ...]
    num_steps: int = 3
    training: bool = True
    inference: bool = False  # an evaluation under torch.inference_mode

    def run(self, model: nn.Module) -> Found:
        """Everything there is to compare, by kind and name."""
        return _train(model, self.inputs, self.num_steps) if self.training else self.forward(model)

    def forward(self, model: nn.Module) -> Found:
        """One forward pass without gradients."""
        model.train(self.training)
        torch.manual_seed(0)
        with torch.inference_mode() if self.inference else torch.no_grad():
            found = _outputs(model(*self.inputs))
        return {k: y.clone() if isinstance(y, torch.Tensor) else y for k, y in found.items()}


def _train(model: nn.Module, inputs: tuple[torch.Tensor, ...], num_steps: int) -> Found:
    """SGD with momentum on a fixed target."""
    model.train()
    params = list(model.parameters()) or [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    inputs = tuple(x.detach().clone().requires_grad_(is_inexact(x)) for x in inputs)
    found: Found = {}
    for step in range(num_steps):
        torch.manual_seed(step)  # dropout
        output = model(*inputs)
        loss = _loss(output)
        optimizer.zero_grad()
        for x in inputs:
            x.grad = None
        if loss is not None and loss.requires_grad:
            loss.backward()
        if step == 0:
            found |= _outputs(output) | _gradients(model, inputs)
        if loss is not None:
            found["loss", f"step {step + 1}"] = loss.detach()
        optimizer.step()
    return found | _state(model)


def _outputs(output: Any) -> Found:
    """Every leaf by its place, so that another nesting is a difference too."""
    return {
        ("output", f"output{pytree.keystr(place)}"): (
            y.detach().clone() if isinstance(y, torch.Tensor) else y
        )
        for place, y in pytree.tree_leaves_with_path(output)
    }


def _loss(output: Any) -> torch.Tensor | None:
    """Something that depends on every element that is finite, differently; None of integers."""
    parts = [
        _part(y, torch.Generator().manual_seed(seed))
        for seed, y in enumerate(pytree.tree_leaves(output))
        if is_inexact(y) and y.numel()
    ]
    return torch.stack(parts).sum() if parts else None


def _part(y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    y = (torch.view_as_real(y.resolve_conj()) if y.is_complex() else y).double()
    y = y.masked_fill(~y.detach().isfinite(), 0.0)
    target = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.device)
    scale = y.detach().square().mean().sqrt() + 1e-6
    return (y / scale - target).square().mean()


def _gradients(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Found:
    """Copies: those of a parallel model lie where the next backward pass puts its own."""
    if isinstance(model, ParallelModel):
        gradients = of(model).full_gradients((0,))
    else:
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    return {("gradient", name): gradients[name].clone() for name in sorted(gradients)}


def _state(model: nn.Module) -> Found:
    """Buffers, which are statistics mostly, and weights."""
    split = isinstance(model, ParallelModel)
    state = of(model).full_tensors((0,)) if split else dict(named_tensors(model))
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    by_kind = {("weight" if n in weights else "statistics", n): t for n, t in state.items()}
    return {key: by_kind[key].detach() for key in sorted(by_kind)}
