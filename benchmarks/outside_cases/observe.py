"""What there is to see of a training step, and whether two sights are the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.parallel import ParallelModel

# Largest error of an element, relative to the largest of its tensor.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
FLOOR = 1e-13  # of the largest gradient or weight: less may be nothing but rounding
COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32}


@dataclass(frozen=True)
class Seen:
    """Everything that can be compared after some steps, by name, and how outputs are nested."""

    tensors: dict[str, torch.Tensor]
    spec: Any


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
    tensors: dict[str, torch.Tensor] = {}
    spec: Any = None
    for step in range(num_steps if optimizer else 1):
        torch.manual_seed(step)
        for x in inputs:
            x.grad = None
        model.zero_grad()
        with torch.set_grad_enabled(backward):
            outputs, spec = _flat(model(*inputs))
        tensors |= {f"output {i} of step {step}": y.clone() for i, y in enumerate(outputs)}
        if backward:
            _loss(outputs).backward()
            tensors |= {f"gradient of {n} in step {step}": g for n, g in _gradients(model, inputs)}
        if optimizer is not None:
            optimizer.step()
    if and_eval:
        with torch.no_grad():
            outputs, _ = _flat(model.eval()(*inputs))
        tensors |= {f"output {i} in evaluation": y for i, y in enumerate(outputs)}
    tensors |= {f"{name} afterwards": tensor.clone() for name, tensor in _state(model).items()}
    tensors["random numbers afterwards"] = torch.get_rng_state()
    tensors |= {f"input {i} afterwards": x.detach() for i, x in enumerate(inputs)}
    return Seen({name: t.detach() for name, t in tensors.items()}, spec)


def _own(x: torch.Tensor, backward: bool) -> torch.Tensor:
    """A copy with the same strides."""
    x = copy.deepcopy(x.detach())
    return x.requires_grad_(backward and (x.is_floating_point() or x.is_complex()))


def _flat(output: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of an output, and all else about it: its nesting and what is no tensor."""
    leaves, spec = pytree.tree_flatten(output)
    others = [None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], (spec, others)


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A sum that weighs every element of every output differently."""
    terms = []
    for seed, y in enumerate(outputs):
        if y.requires_grad:
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            generator = torch.Generator().manual_seed(seed)
            weights = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.dtype)
            terms.append((y * weights).double().sum())
    if not terms:
        raise RuntimeError("no output has a gradient")
    return torch.stack(terms).sum()


def _gradients(
    model: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, ParallelModel):
        yield from model.full_gradients().items()
    else:
        yield from ((n, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None)
    yield from ((f"input {i}", x.grad) for i, x in enumerate(inputs) if x.grad is not None)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, ParallelModel):
        return model.full_tensors()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: tensor.detach() for name, tensor in named}


def difference(found: Seen, expected: Seen, noise: dict[str, float] | None = None) -> str | None:
    """What differs first, in words; `noise` is how much each tensor may change by itself."""
    if found.spec != expected.spec:
        return f"the output is nested as {found.spec} and not {expected.spec}"
    top = _tops(expected)
    for name in {**expected.tensors, **found.tensors}:
        if name not in found.tensors:
            return f"{name} is missing"
        if name not in expected.tensors:
            return f"{name} should not be there"
        allowed = max(FLOOR * top.get(_kind(name), 0.0), 100 * (noise or {}).get(name, 0.0))
        reason = _differs(found.tensors[name], expected.tensors[name], allowed)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _kind(name: str) -> str:
    if name.startswith("gradient"):
        return "gradient"
    return "state" if name.endswith("afterwards") and not name.startswith("input") else name


def _tops(seen: Seen) -> dict[str, float]:
    """The largest finite element of all gradients, of all states, and of each other tensor."""
    top: dict[str, float] = {}
    for name, tensor in seen.tensors.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        size = _size(_reals(tensor).nan_to_num(0, 0, 0))
        top[_kind(name)] = max(top.get(_kind(name), 0.0), size)
    return top


def _differs(found: torch.Tensor, expected: torch.Tensor, allowed: float) -> str | None:
    if found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        if torch.equal(found, expected) or allowed == float("inf"):
            return None
        return f"{int((found != expected).sum())} of {expected.numel()} {expected.dtype} differ"
    tolerance = TOLERANCE[COMPLEX.get(expected.dtype, expected.dtype)]
    found, expected = _reals(found), _reals(expected)
    odd = ~expected.isfinite()
    if not torch.equal(_marks(found), _marks(expected)):
        num_found = int((~found.isfinite()).sum())
        return f"other elements are infinite or NaN ({num_found} instead of {int(odd.sum())})"
    error = _size(torch.where(odd, 0.0, found - expected))
    size = _size(torch.where(odd, 0.0, expected))
    if error <= max(tolerance * size, allowed, 1e-300):
        return None
    return f"error {error:.3g} (size {size:.3g})"


def _reals(x: torch.Tensor) -> torch.Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.resolve_neg().double()


def _marks(x: torch.Tensor) -> torch.Tensor:
    """1 for NaN, 2 and 3 for plus and minus infinity."""
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


def _size(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def noise_of(changed: list[Seen], expected: Seen) -> dict[str, float]:
    """How far each tensor moved when inputs and weights were changed in their last bits.

    Whole numbers that did not stay the same may be anything.
    """
    noise = {}
    for name, tensor in expected.tensors.items():
        others = [seen.tensors.get(name, tensor) for seen in changed]
        if tensor.is_floating_point() or tensor.is_complex():
            moves = [_reals(x) - _reals(tensor) for x in others if x.shape == tensor.shape]
            noise[name] = max((_size(move.nan_to_num(0, 0, 0)) for move in moves), default=0.0)
        elif not all(torch.equal(x, tensor) for x in others):
            noise[name] = float("inf")
    return noise


def nudged(x: torch.Tensor, seed: int) -> torch.Tensor:
    """The tensor with every element changed by about its last bit."""
    if not x.is_floating_point():
        return x
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(-1, 2, x.shape, generator=generator)
    return (x.detach().double() * (1 + signs * torch.finfo(x.dtype).eps)).to(x.dtype)
