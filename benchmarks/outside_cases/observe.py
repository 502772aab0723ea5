"""What there is to see of a few training steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.runtime.parallel import ParallelModel, of

Key = tuple[str, str]  # kind and name


@dataclass(frozen=True)
class Seen:
    """Everything that can be compared after some steps, and how outputs are nested."""

    tensors: dict[Key, torch.Tensor]
    nesting: Any

    def equals(self, other: Seen) -> bool:
        """Whether both are the same to the bit."""
        keys = self.tensors.keys()
        same = self.nesting == other.nesting and keys == other.tensors.keys()
        return same and all(_equal(self.tensors[key], other.tensors[key]) for key in keys)


def observe(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    training: bool,
    backward: bool,
    num_steps: int = 1,
    and_eval: bool = False,
) -> Seen:
    """Trains (or only calls) a model and notes outputs, gradients, statistics and weights."""
    model.train(training)
    inputs = tuple(_own(x, backward) for x in inputs)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=1e-2) if params and backward else None
    tensors: dict[Key, torch.Tensor] = {}
    nesting: Any = None
    for step in range(num_steps if optimizer else 1):
        torch.manual_seed(step)
        for x in inputs:
            x.grad = None
        model.zero_grad()
        with torch.set_grad_enabled(backward):
            outputs, nesting = _flat(model(*inputs))
        tensors |= {("output", f"{i} of step {step}"): y.clone() for i, y in enumerate(outputs)}
        if backward:
            loss = _loss(outputs)
            if loss is not None:
                loss.backward()
            gradients = _gradients(model, inputs)
            tensors |= {("gradient", f"of {n} in step {step}"): g.clone() for n, g in gradients}
        if optimizer is not None:
            if and_eval:  # else some networks overflow, where torch's norms give anything
                torch.nn.utils.clip_grad_norm_(params, 1.0)  # by value, signs of noise would count
            optimizer.step()
    if and_eval:
        with torch.no_grad():
            outputs, _ = _flat(model.eval()(*inputs))
        tensors |= {("output", f"{i} in evaluation"): y for i, y in enumerate(outputs)}
    tensors |= {("state", name): tensor.clone() for name, tensor in _state(model).items()}
    tensors["random numbers", "afterwards"] = torch.get_rng_state()
    tensors |= {("input", f"{i} afterwards"): x for i, x in enumerate(inputs)}
    return Seen({key: tensor.detach() for key, tensor in tensors.items()}, nesting)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    if a.dtype == torch.complex32:  # which torch does not compare
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    return torch.equal(a, b)


def _own(x: torch.Tensor, backward: bool) -> torch.Tensor:
    """A copy with the same strides."""
    x = copy.deepcopy(x.detach())
    return x.requires_grad_(backward and (x.is_floating_point() or x.is_complex()))


def _flat(output: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of an output, and all else about it: its nesting and what is no tensor."""
    leaves, spec = pytree.tree_flatten(output)
    others = [None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], (spec, others)


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """A sum that weighs every element of every output differently, if any has a gradient."""
    terms = []
    for seed, y in enumerate(outputs):
        if y.requires_grad:
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            generator = torch.Generator().manual_seed(seed)
            weights = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.dtype)
            terms.append((y * weights).double().sum())
    return torch.stack(terms).sum() if terms else None


def _gradients(
    model: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, ParallelModel):
        yield from of(model).full_gradients().items()
    else:
        yield from ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    yield from ((f"input {i}", x.grad) for i, x in enumerate(inputs) if x.grad is not None)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, ParallelModel):
        return of(model).full_tensors()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: tensor.detach() for name, tensor in named}
