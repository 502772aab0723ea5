"""Proof that a plan computes what one device computes: outputs, gradients, statistics, weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.comm import Communicator
from shardwise.parallel import Graphs, ParallelModel, parallelize
from shardwise.plan import Plan
from shardwise.stored import named_tensors

TOLERANCE = 1e-9  # relative, in float64


@dataclass(frozen=True)
class Comparison:
    """The largest error of one tensor, relative to the largest element of its kind.

    Elements below `FLOOR` of the largest tensor of the same kind count as zero: the gradient of a
    bias before batch norm, say, is nothing but rounding on one device too.
    """

    kind: str  # output, loss, gradient, statistics, weight
    name: str
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE


FLOOR = 1e-4


def compare(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[torch.Tensor, ...],
    comm: Communicator | None = None,
    num_steps: int = 3,
    graphs: Graphs | None = None,
) -> list[Comparison]:
    """Trains the model with and without the plan and compares everything; rank 0 has the result.

    All ranks call it with the same model and inputs.
    """
    comm = comm or Communicator()
    results: list[Comparison] = []
    reference = _train(copy.deepcopy(model), inputs, num_steps) if comm.rank == 0 else None
    parallel = parallelize(model, plan, comm=comm, graphs=graphs)
    for kind, found in _train(parallel, inputs, num_steps):
        if kind in ("output", "loss"):
            results += _agreement(kind, {name: ("", t) for name, t in found.items()}, comm)
        if reference is not None:
            expected_kind, expected = next(reference)
            assert kind == expected_kind
            results += _errors(kind, found, expected)
    return results + _agreement("weight", parallel.blocks(), comm)


def _agreement(
    kind: str, found: Mapping[str, tuple[Any, torch.Tensor]], comm: Communicator
) -> list[Comparison]:
    """Ranks that hold the same part of a tensor must hold the same numbers, to the bit."""
    sums = {
        (name, str(place)): repr(float(tensor.detach().cpu().contiguous().double().sum()))
        for name, (place, tensor) in found.items()
    }
    different: dict[str, Comparison] = {}
    known: dict[tuple[str, str], str] = {}
    for everyone in comm.gather_objects(sums):
        for key, value in everyone.items():
            if known.setdefault(key, value) != value:
                name = f"{key[0]} differs between ranks"
                different[name] = Comparison(kind, name, float("inf"))
    return list(different.values())


Tensors = dict[str, torch.Tensor]


def _train(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], num_steps: int
) -> Iterator[tuple[str, Tensors]]:
    """SGD with momentum on a fixed target; yields what there is to compare, step by step."""
    model.train()
    params = list(model.parameters()) or [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    for step in range(num_steps):
        torch.manual_seed(step)  # dropout
        outputs = pytree.tree_leaves(model(*inputs))
        loss = torch.stack([_loss(y, seed) for seed, y in enumerate(outputs)]).sum()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            yield "output", {f"output {i}": y.detach() for i, y in enumerate(outputs)}
            yield "gradient", _gradients(model, inputs)
        yield "loss", {f"step {step + 1}": loss.detach()}
        optimizer.step()
    state = model.full_tensors((0,)) if isinstance(model, ParallelModel) else _state(model)
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield "statistics", {name: tensor for name, tensor in state.items() if name not in weights}
    yield "weight", {name: tensor for name, tensor in state.items() if name in weights}


def _loss(y: torch.Tensor, seed: int) -> torch.Tensor:
    """Something that depends on every element, differently."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y)
    scale = y.detach().square().mean().sqrt() + 1e-6
    return (y / scale - target).square().mean()


def _gradients(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Tensors:
    if isinstance(model, ParallelModel):
        gradients = model.full_gradients((0,))
    else:
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for index, x in enumerate(inputs):
        if x.grad is not None:
            gradients[f"input {index}"] = x.grad
    return {name: gradients[name] for name in sorted(gradients)}


def _state(model: nn.Module) -> Tensors:
    return {name: tensor.detach() for name, tensor in named_tensors(model)}


def _errors(kind: str, found: Tensors, expected: Tensors) -> list[Comparison]:
    assert found.keys() == expected.keys(), (kind, found.keys() ^ expected.keys())
    top = max((_size(t) for t in expected.values()), default=0.0)
    results = []
    for name, tensor in expected.items():
        scale = max(_size(tensor), FLOOR * top, 1e-300)
        error = _size(found[name].double() - tensor.double()) / scale
        same_shape = found[name].shape == tensor.shape
        results.append(Comparison(kind, name, error if same_shape else float("inf")))
    return results


def _size(tensor: torch.Tensor) -> float:
    """The largest element; infinite if any is not a number."""
    if tensor.numel() == 0:
        return 0.0
    size = float(tensor.double().abs().max())
    return size if size == size else float("inf")
