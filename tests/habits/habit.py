"""Runs a piece of user code on one device and under plans: it gives the same, or is refused.

A habit is a function of a model and its inputs, or, where it does something before the model is
made parallel, of `wrap`, which stands for `parallelize`, and on one device for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from exactness import seeded, seeded_input
from shardwise import Plan, ShardwiseError, of, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import ModelGraphs

Tensors = tuple[torch.Tensor, ...]
Wrap = Callable[..., Any]  # of a model and its inputs

PLANS: dict[str, tuple[int, Callable[[LayerGraph], Plan]]] = {
    "n=2": (2, lambda graph: Plan.uniform(graph, 2, n=2)),
    "h=2": (2, lambda graph: Plan.uniform(graph, 2, h=2)),
    "f=2": (2, lambda graph: Plan.uniform(graph, 2, f=2)),
    "random": (3, lambda graph: Plan.random(graph, 3, seed=1)),
}
EVERY = tuple(PLANS)


class Net(nn.Module):
    """Small, with everything that training has: norms with statistics, shortcuts, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        y = y + torch.relu(self.second(y))
        return self.head(y.mean((2, 3)))


def net() -> nn.Module:
    return seeded(Net())


def image() -> torch.Tensor:
    return seeded_input((4, 3, 6, 6))


_known: list[ModelGraphs] = []  # of the usual network, which is captured once for all tests


@dataclass
class Outcome:
    """What a piece of code gave on one device or one rank, or the sentence that refused it."""

    returned: Any = None
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    refusal: str = ""


def assert_same(
    code: Callable[..., Any],
    build: Callable[[], nn.Module] = net,
    inputs: Callable[[], torch.Tensor | Tensors] = image,
    under: Sequence[str] = EVERY,
) -> None:
    """code(model, *inputs) gives the same on one device and under these plans."""
    known = _known if build is net and inputs is image else None
    assert_same_script(_script(code, build, inputs), under, known)


def assert_refused(
    code: Callable[..., Any],
    sentence: str,
    build: Callable[[], nn.Module] = net,
    inputs: Callable[[], torch.Tensor | Tensors] = image,
    under: Sequence[str] = EVERY,
) -> None:
    """code(model, *inputs) ends on all ranks with a sentence that matches."""
    known = _known if build is net and inputs is image else None
    assert_script_refused(_script(code, build, inputs), sentence, under, known)


def assert_same_script(
    script: Callable[[Wrap], Any],
    under: Sequence[str] = EVERY,
    graphs: list[ModelGraphs] | None = None,
) -> None:
    """script(wrap) gives the same on one device and under these plans: what it returns, and the
    weights and gradients of all models that it has wrapped."""
    expected = _on_one_device(script)
    graphs = [] if graphs is None else graphs
    for name in under:
        for rank, found in enumerate(_under(script, name, graphs)):
            where = f"{name}, rank {rank}"
            assert not found.refusal, f"{where}: {found.refusal}"
            _assert_equal(found.returned, expected.returned, f"{where}: returned")
            _assert_equal(found.weights, expected.weights, f"{where}: weights")
            _assert_equal(found.gradients, expected.gradients, f"{where}: gradients")


def assert_script_refused(
    script: Callable[[Wrap], Any],
    sentence: str,
    under: Sequence[str] = EVERY,
    graphs: list[ModelGraphs] | None = None,
) -> None:
    """script(wrap), which one device runs, ends on all ranks with a sentence that matches."""
    _on_one_device(script)
    graphs = [] if graphs is None else graphs
    for name in under:
        for rank, found in enumerate(_under(script, name, graphs)):
            where = f"{name}, rank {rank}"
            assert found.refusal, f"{where} was not refused, and gave {found.returned}"
            assert re.search(sentence, found.refusal), f"{where}: {found.refusal}"


def _script(code: Any, build: Any, inputs: Any) -> Callable[[Wrap], Any]:
    def script(wrap: Wrap) -> Any:
        given = inputs()
        given = given if isinstance(given, tuple) else (given,)
        return code(wrap(build(), *given), *given)

    return script


def _on_one_device(script: Callable[[Wrap], Any]) -> Outcome:
    models: list[nn.Module] = []

    def wrap(model: nn.Module, *_: torch.Tensor, **__: Any) -> nn.Module:
        models.append(model)
        return model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = Outcome(_copied(script(wrap)))
    found.weights = [_copied(dict(model.state_dict())) for model in models]
    for model in models:
        named = model.named_parameters()
        found.gradients.append({name: p.grad for name, p in named if p.grad is not None})
    return found


def _under(script: Callable[[Wrap], Any], name: str, graphs: list[ModelGraphs]) -> list[Outcome]:
    """What every rank got; the graphs of all models wrapped are captured once for all plans."""
    world, make = PLANS[name]

    def work(comm: Communicator) -> Outcome:
        models: list[nn.Module] = []

        def parallel(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> nn.Module:
            if len(graphs) == len(models):
                shapes, dtypes = zip(*((tuple(x.shape), x.dtype) for x in inputs), strict=True)
                graphs.append(ModelGraphs(model, shapes, dtypes))
            known = graphs[len(models)]
            plan = make(known(True, inputs[0].shape[0]))
            models.append(parallelize(model, plan, comm=comm, graphs=known, **options))
            return models[-1]

        torch.manual_seed(0)
        try:
            return _outcome(script(parallel), models)
        except ShardwiseError as error:
            return Outcome(refusal=str(error))

    return World(world).run(work)


def _outcome(returned: Any, models: list[nn.Module]) -> Outcome:
    found = Outcome(_copied(returned))
    for model in models:
        found.weights.append(_copied(dict(model.state_dict())))
        found.gradients.append(_copied(of(model).full_gradients()))
    return found


def _copied(values: Any) -> Any:
    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return pytree.tree_map(copied, values)


def _assert_equal(found: Any, expected: Any, where: str) -> None:
    (mine, my_spec), (theirs, their_spec) = map(pytree.tree_flatten, (found, expected))
    assert my_spec == their_spec, f"{where}: {my_spec} instead of {their_spec}"
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert type(one) is type(other), f"{where} {index}: {one!r} instead of {other!r}"
        if isinstance(other, (torch.Tensor, float)):
            exact = isinstance(other, torch.Tensor) and not other.dtype.is_floating_point
            torch.testing.assert_close(
                one,
                other,
                rtol=0 if exact else 1e-9,
                atol=0 if exact else 1e-10,
                equal_nan=True,
                msg=lambda text, index=index: f"{where} {index}: {text}",
            )
        else:
            assert one == other, f"{where} {index}: {one!r} instead of {other!r}"
