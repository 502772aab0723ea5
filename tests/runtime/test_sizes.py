"""A parallel model takes inputs of any size that its network takes."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

from exactness import seeded, seeded_input
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.geometry.grid import Config
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import ModelGraphs, capture
from shardwise.plans.fitting import fit
from shardwise.plans.plan import Plan
from shardwise.plans.program import Program
from shardwise.runtime.parallel import of, parallelize

SHAPE = (2, 3, 12, 9)
SIZES = [SHAPE, (1, 3, 12, 9), (3, 3, 7, 16), (1, 3, 20, 20), (1, 3, 21, 20), (2, 3, 3, 3)]


class Net(nn.Module):
    """Sizes are used in every way: halves, up-sampling, padding, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, stride=2)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = functional.silu(self.norm(self.first(x)))
        y = functional.interpolate(self.down(y), scale_factor=2.0)
        if x.shape[2] % 2:
            y = functional.pad(y, (0, 0, 1, 0)) * 2
        return self.head(y.mean((2, 3))), y


def passes(model: nn.Module, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Outputs and all gradients for inputs of this shape."""
    x = seeded_input(shape).requires_grad_()
    first, second = model(x)
    model.zero_grad()
    (first.sin().sum() + second.square().mean()).backward()
    split = hasattr(model, "full_gradients")
    grads = (
        of(model).full_gradients() if split else {n: p.grad for n, p in model.named_parameters()}
    )
    assert x.grad is not None
    return [first, second, x.grad, *(grads[name] for name in sorted(grads))]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def plans(graph: LayerGraph) -> list[Plan]:
    uniform = [{"n": 2}, {"h": 3}, {"h": 2, "w": 2}, {"f": 3}, {"c": 2, "h": 2}]
    return [*(Plan.uniform(graph, 4, **split) for split in uniform), Plan.random(graph, 4, 3)]


def test_any_size_gives_what_one_device_gives() -> None:
    net = seeded(Net())
    graphs = ModelGraphs(net, (SHAPE,), (torch.float64,))
    expected = {shape: passes(copy.deepcopy(net), shape) for shape in SIZES}

    def work(comm: Communicator, plan: Plan) -> None:
        model = parallelize(net, plan, comm=comm, graphs=graphs)
        for shape in SIZES:
            assert_same(passes(model, shape), expected[shape])

    for plan in plans(graphs(True, (SHAPE,))):
        World(plan.world).run(work, plan)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y * 2 if x.shape[0] > 3 or x.shape[3] > 10 else y + 1


@pytest.mark.parametrize("shape", [(5, 3, 6, 6), (2, 3, 6, 6), (5, 3, 6, 12), (2, 3, 6, 12)])
def test_a_branch_on_a_size_is_taken_as_on_one_device(shape: tuple[int, ...]) -> None:
    net = seeded(Branching())
    for first in ((5, 3, 6, 6), (2, 3, 6, 6)):
        plan = Plan.uniform(capture(net, seeded_input(first)), h=2)

        def work(comm: Communicator, plan: Plan = plan) -> None:
            x = seeded_input(shape)
            torch.testing.assert_close(parallelize(net, plan, comm=comm)(x), net(x))

        World(2).run(work)


class Placed(nn.Module):
    """Trained tables of positions, which are resized to the image, or cut to it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.places = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.ones(1, 4, 6, 4))
        self.most = nn.Parameter(torch.ones(4, 9, 7))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x)
        y = y + functional.interpolate(self.places, size=y.shape[2:], mode="bicubic")
        y = y * self.most[:, : y.shape[2], : y.shape[3]]
        return y.mean((2, 3)), y


@pytest.mark.parametrize("first", [(2, 3, 6, 4), (2, 3, 9, 7)])  # those of the tables
def test_a_table_of_positions_is_for_images_of_any_size(first: tuple[int, ...]) -> None:
    net = seeded(Placed())
    sizes = [first, (1, 3, 9, 5), (2, 3, 5, 3), (1, 3, 9, 7)]
    graphs = ModelGraphs(net, (sizes[0],), (torch.float64,))
    expected = {shape: passes(copy.deepcopy(net), shape) for shape in sizes}

    def work(comm: Communicator, plan: Plan) -> None:
        model = parallelize(net, plan, comm=comm, graphs=graphs)
        for shape in sizes:
            assert_same(passes(model, shape), expected[shape])

    for plan in plans(graphs(True, (sizes[0],))):
        World(plan.world).run(work, plan)


def test_parts_of_another_size_are_given_with_the_shape_of_the_whole() -> None:
    net = seeded(Net())
    plan = Plan.uniform(capture(net, seeded_input(SHAPE)), h=2)
    x = seeded_input((1, 3, 14, 11))

    def work(comm: Communicator) -> None:
        model = parallelize(net, plan, comm=comm)
        box = model.input_box(tuple(x.shape))
        part = x[tuple(map(slice, box.starts, box.stops))]
        with torch.no_grad():
            assert_same(list(model(part, batch=x.shape)), list(net(x)))
            assert model.output_box([tuple(x.shape)], 1).shape[2] == 6

    World(2).run(work)


# -- plans for several sizes -----------------------------------------------------------------------


def several() -> tuple[nn.Module, Plan]:
    """Small images over filters, large ones over rows."""
    net = seeded(Net())
    large = Plan.uniform(capture(net, seeded_input((1, 3, 40, 40))), h=2)
    small = Plan.uniform(capture(net, seeded_input((1, 3, 6, 6))), f=2)
    return net, Plan(**{**vars(small), "others": (large,)})


def test_the_plan_of_the_nearest_size_rules() -> None:
    net, plan = several()
    for shape, split in {(1, 3, 8, 8): "f=2", (1, 3, 30, 41): "h=2", (2, 3, 40, 40): "h=2"}.items():
        graph = capture(net, seeded_input(shape))
        assert str(plan.config(graph["first"], graph)) == split


def test_weights_that_sizes_split_in_different_ways_are_kept_whole() -> None:
    net, plan = several()
    sizes = [(1, 3, 6, 6), (1, 3, 40, 40), (2, 3, 13, 8)]
    expected = {shape: passes(copy.deepcopy(net), shape) for shape in sizes}

    def work(comm: Communicator) -> None:
        model = parallelize(net, plan, comm=comm)
        layout = model.layout("first.weight")
        assert layout is not None and layout.segments == ((0, 1),)
        for shape in sizes:
            assert_same(passes(model, shape), expected[shape])

    World(2).run(work)


def test_a_plan_for_several_sizes_is_a_file(tmp_path) -> None:
    _, plan = several()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_smaller_grid_keeps_every_rank_in_its_place() -> None:
    graph = capture(Branching(), torch.zeros(1, 3, 2, 9))
    wanted = Config(h=4, f=2, ranks=(0, 2, 4, 6, 1, 3, 5, 7))  # f=0 are ranks 0, 4, 1, 5
    assert fit(graph["conv"], wanted, 1) == Config(h=2, f=2, ranks=(0, 2, 4, 6))


def test_space_moves_to_another_direction_where_samples_have_no_room() -> None:
    graph = capture(nn.Sequential(nn.Conv1d(3, 4, 3)), torch.zeros(2, 3, 20))
    assert fit(graph["0"], Config(h=2), 2) == Config(n=2)
    assert fit(graph["0"], Config(h=4), 2) == Config(n=2, w=2)
    assert fit(graph["0"], Config(n=4), 2) == Config(n=2)
    wide = Config(h=64, f=2, ranks=(*range(0, 128, 2), *range(1, 128, 2)))
    assert fit(graph["0"], wide, 2).ranks == wide.ranks[:64]  # n=2 w=16 f=2


# -- memory ----------------------------------------------------------------------------------------


def test_many_sizes_in_a_row_leave_nothing_behind() -> None:
    net = seeded(Net())
    plan = Plan.uniform(capture(net, seeded_input(SHAPE)), h=2)

    def count(kind: type) -> int:
        gc.collect()
        return sum(type(each) is kind for each in gc.get_objects())  # a proxy may be of nothing

    def work(comm: Communicator) -> list[int]:
        model = parallelize(net, plan, comm=comm)
        found = []
        for first in (8, 28, 48):
            for size in range(first, first + 20, 2):
                with torch.no_grad():
                    model(seeded_input((1, 3, size, 10)))
            comm.gather_objects(None)  # ranks are threads here: both have ended their passes,
            found.append(count(LayerGraph) + count(Program))
            comm.gather_objects(None)  # and neither has begun another
        return found

    (first, second, third), *_ = World(2).run(work)
    assert third <= second <= first + 4
