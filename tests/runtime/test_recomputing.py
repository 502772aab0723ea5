"""Layers that the backward pass computes again: the same numbers, messages and traces."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from exactness import assert_exact, seeded, seeded_input
from shardwise import Plan, ShardwiseError, capture, optimizer, parallelize
from shardwise.comm import About, Communicator
from shardwise.comm.in_process import InProcess, World
from shardwise.graph.layer_graph import LayerGraph
from shardwise.plans.segments import Segments
from shardwise.runtime.block import plain

SHAPE = (4, 3, 8, 8)


class Net(nn.Module):
    """Branches, a weight that is used twice, all norms, and random numbers."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.first, self.average = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None)
        self.twice, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.other, self.groups = nn.BatchNorm2d(8), nn.GroupNorm(2, 16)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(p)
        self.linear = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.average(self.first(x)))
        y = self.relu(self.norm(self.twice(x)) + x)
        y = self.relu(self.other(self.twice(y)))
        y = self.drop(torch.tanh(self.groups(torch.cat([y, x], 1))))
        return self.linear(torch.max_pool2d(y, 2).flatten(1))


def layers(graph: LayerGraph) -> list[str]:
    return [layer.name for layer in graph.layers if not layer.is_input]


def random_segments(graph: LayerGraph, seed: int) -> Segments:
    """Layers in a row, some left out, cut anywhere."""
    chance, found = random.Random(seed), [[]]
    for name in layers(graph):
        case = chance.random()
        if case < 0.2:
            found.append([])
        elif case > 0.3:
            found[-1].append(name)
    return tuple(tuple(names) for names in found if names)


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, LayerGraph]:
    module = seeded(Net())
    return module, capture(module, seeded_input(SHAPE))


@pytest.mark.parametrize("axes", ["n", "h", "w", "f", "c", "hw", ""])
def test_recomputing_is_exact_under_every_split(net: tuple[Any, LayerGraph], axes: str) -> None:
    module, graph = net
    plan = Plan.uniform(graph, **dict.fromkeys(axes, 2))
    segments = [(tuple(layers(graph)),), tuple((name,) for name in layers(graph))]
    segments += [random_segments(graph, seed) for seed in range(2)]
    plans = [replace(plan, recompute=each) for each in segments]
    assert_exact(module, seeded_input(SHAPE), plans, graph, num_steps=2)


def test_recomputing_is_exact_under_random_plans(net: tuple[Any, LayerGraph]) -> None:
    module, graph = net
    plans = [
        replace(Plan.random(graph, workers, seed), recompute=random_segments(graph, seed))
        for seed in range(4)
        for workers in (2, 3, 4)
    ]
    assert_exact(module, seeded_input(SHAPE), plans, graph, num_steps=2)


# -- beside one device: bit by bit what is computed when all is kept ------------------------------


Work = Callable[[Any, torch.Tensor], Any]


def ran(module: nn.Module, plan: Plan, work: Work, **options: Any) -> list[Any]:
    """What `work` returns on every rank of a model under a plan."""

    def on_rank(comm: Communicator) -> Any:
        torch.manual_seed(7)
        return work(parallelize(module, plan, comm=comm, **options), seeded_input(SHAPE))

    return World(plan.world, 0).run(on_rank)


def state(model: Any) -> list[torch.Tensor]:
    """Gradients, running statistics and where random numbers have come to."""
    found = [param.grad for param in model.parameters() if param.grad is not None]
    found += [*model.buffers(), torch.get_rng_state()]
    return [plain(tensor).clone() for tensor in found]


def assert_same(net: tuple[Any, LayerGraph], plan: Plan, work: Work, **options: Any) -> None:
    """A plan gives the same bits with everything computed again as without.

    Where segments cut blocks, sums of gradients have another order.
    """
    module, graph = net
    expected = ran(module, plan, work, **options)
    for segments in ((tuple(layers(graph)),), random_segments(graph, 1)):
        found = ran(module, replace(plan, recompute=segments), work, **options)
        same = torch.equal if len(segments) == 1 else torch.allclose
        for rank, tensors in enumerate(expected):
            for a, b in zip(tensors, found[rank], strict=True):
                assert same(a, b)


def step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().sum().backward()
    return state(model)


@pytest.mark.parametrize("split", [{"h": 2}, {"n": 2}, {"f": 2}, {"n": 2, "w": 2}])
def test_gradients_and_statistics_are_the_same_bits(
    net: tuple[Any, LayerGraph], split: dict[str, int]
) -> None:
    assert_same(net, Plan.uniform(net[1], **split), step)


def test_nothing_is_sent_twice(
    net: tuple[Any, LayerGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter = Counter()

    def counted(name: str) -> None:
        own = getattr(InProcess, name)

        def send(*args: Any, **more: Any) -> Any:
            about = [each for each in (*args, *more.values()) if isinstance(each, About)]
            sent[(name, *map(str, about))] += 1
            return own(*args, **more)

        monkeypatch.setattr(InProcess, name, send)

    for name in ("exchange", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        counted(name)
    plan, everything = Plan.uniform(net[1], h=2, w=2), (tuple(layers(net[1])),)
    ran(net[0], plan, step)
    without, sent = sent.copy(), sent
    sent.clear()
    ran(net[0], replace(plan, recompute=everything), step)
    assert sent == without and any("statistics" in str(about) for about in without)


def test_two_backward_passes_and_two_losses_are_the_same(net: tuple[Any, LayerGraph]) -> None:
    def twice(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = model(x)
        y.square().sum().backward(retain_graph=True)
        y.sum().backward()
        first, second = model(x), model(-x)
        (first * second).sum().backward()
        return state(model)

    assert_same(net, Plan.uniform(net[1], h=2), twice)


def test_gradients_of_inputs_and_without_sums_are_the_same(net: tuple[Any, LayerGraph]) -> None:
    def held(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        x.requires_grad_()
        with model.no_sync():
            model(x).square().sum().backward()
        model(x).sum().backward()
        return [*state(model), x.grad]  # type: ignore[list-item]

    assert_same(net, Plan.uniform(net[1], h=2), held)


def test_the_mode_is_that_of_the_forward_pass(net: tuple[Any, LayerGraph]) -> None:
    def switched(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = model(x)
        model.eval()
        model.drop.p = 0.9
        y.square().sum().backward()
        assert not model.drop.training and model.drop.p == 0.9
        return state(model)

    assert_same(net, Plan.uniform(net[1], n=2), switched)


def test_delayed_updates_are_the_same(net: tuple[Any, LayerGraph]) -> None:
    def trained(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        sgd = optimizer(model, torch.optim.SGD, lr=1e-3, momentum=0.9)
        for _ in range(3):
            sgd.zero_grad()
            model(x).square().sum().backward()
            sgd.step()
        model.flush()
        return [plain(param).clone() for param in model.parameters()]

    plan = Plan.uniform(net[1], n=2)
    linear = replace(plan.layers["linear"], gradient="gather")
    plan = replace(plan, layers={**plan.layers, "linear": linear})
    assert_same(net, plan, trained)


@pytest.mark.parametrize("precision", ["bf16", None])
def test_16_bits_are_the_same(precision: Any) -> None:
    module = Net()
    graph = capture(module, torch.zeros(SHAPE))

    def half(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        return step(model, x.float())

    assert_same((module, graph), Plan.uniform(graph, h=2), half, precision=precision)


def test_compiled_blocks_stand_beside_what_is_computed_again(net: tuple[Any, LayerGraph]) -> None:
    module, graph = net
    plan = replace(Plan.uniform(graph, world=1), recompute=(("norm", "relu_1"),))
    compiled, stock = (ran(module, plan, step, compile=each)[0] for each in (True, False))
    for a, b in zip(compiled, stock, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_and_inputs_that_changed_meanwhile_are_refused(net: tuple[Any, LayerGraph]) -> None:
    def of_weights(model: Any, x: torch.Tensor) -> None:
        y = model(x)
        with torch.no_grad():
            model.twice.weight.mul_(2)
        y.sum().backward()

    def of_inputs(model: Any, x: torch.Tensor) -> None:
        y = model(x)
        x.zero_()
        y.sum().backward()

    plan = replace(Plan.uniform(net[1], n=2), recompute=(tuple(layers(net[1])),))
    for work, name in ((of_weights, "twice.weight"), (of_inputs, "x>0")):
        with pytest.raises(ShardwiseError, match=f"{name!r} was changed in place between"):
            ran(net[0], plan, work)


# -- what is kept ---------------------------------------------------------------------------------


def test_only_what_comes_from_outside_is_kept(net: tuple[Any, LayerGraph]) -> None:
    """Measured as the elements of tensors that a pass holds when forward is over."""

    def kept(model: Any, x: torch.Tensor) -> int:
        saved = model(x).grad_fn.made.machine
        values = [v for kept in saved.kept.values() for v in kept.values.values()]
        received = [t for k in saved.kept.values() for own in k.received.values() for t in own]
        assert not saved.tapes
        return sum(t.numel() for t in [*values, *received])

    plan = replace(Plan.uniform(net[1], h=2), recompute=(tuple(layers(net[1])),))
    own_rows = 4 * 3 * (4 + 2) * 8  # of the input, which has borders and padding
    borders = 2 * 4 * 8 * 8  # a row for each of the two convolutions
    exchanged = 4 * 16 * 4 * 4 // 4  # the other half of the two samples of the linear layer
    assert ran(net[0], plan, kept) == [own_rows + borders + exchanged] * 2
