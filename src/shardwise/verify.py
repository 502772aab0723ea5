"""Proof that a plan computes what one device computes: outputs, gradients, statistics, weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.comm import Communicator
from shardwise.parallel import Graphs, ParallelModel, parallelize
from shardwise.plan import Plan

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
    for kind, found in _train(
        parallelize(model, plan, comm=comm, graphs=graphs), inputs, num_steps
    ):
        results += _agreement(kind, found, comm)
        if reference is not None:
            expected_kind, expected = next(reference)
            assert kind == expected_kind
            results += _errors(kind, found, expected)
    return results


def _agreement(kind: str, found: Tensors, comm: Communicator) -> list[Comparison]:
    """Every rank must hold the same tensors, to the bit, in what each of them holds whole."""
    sums = [float(t.cpu().contiguous().double().sum()) for t in found.values()]
    everyone = comm.gather_objects(sums)
    same = all(other == sums or any(s != s for s in other) for other in everyone)
    return [] if same else [Comparison(kind, "differs between ranks", float("inf"))]


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
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    weights = {name for name, _ in model.named_parameters()}
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
        gradients = model.full_gradients()
    else:
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for index, x in enumerate(inputs):
        if x.grad is not None:
            gradients[f"input {index}"] = x.grad
    return {name: gradients[name].clone() for name in sorted(gradients)}


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
