"""The gradient engine: sums that start early change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from pool import shared_pool
from recording import Recording
from shardwise import Engine, Plan, capture, parallelize
from summed_training import OPTIMIZERS, STEPS, Net, train, weights_of

ENGINES = [
    Engine("end"),
    Engine("layer"),
    Engine("chunks", last=1),
    Engine("chunks", last=3),
    Engine("chunks", last="auto"),
    Engine("buckets", bucket_bytes=1000),
    Engine("layer", wait="step"),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{e.mode}{e.last or ''} {e.wait}")
def test_weights_after_some_steps_are_those_of_one_device(engine: Engine, optimizer: str) -> None:
    alone = train(seeded(Net()), optimizer, STEPS).state_dict()
    splits = [{"n": 2, "h": 2}]
    if optimizer == "momentum":  # how gradients are summed does not depend on who reads them
        splits += [{"n": 4}, {"n": 2, "f": 2}]
    for states in shared_pool(4).run(weights_of, engine, splits, optimizer)[0:1]:
        for state in states:
            for name, tensor in alone.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)


def test_gradients_of_several_backward_passes_add_up() -> None:
    alone = train(seeded(Net()), "momentum", STEPS, accumulate=True).state_dict()
    splits = [{"n": 4}, {"n": 2, "h": 2}]
    states = shared_pool(4).run(weights_of, Engine("layer"), splits, "momentum", True)[0]
    for state in states:
        for name, tensor in alone.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)


def _sums(engine: Engine) -> list[int]:
    """The bytes of every sum of gradients of one step, in order."""
    plain = seeded(Net())
    comm = Recording()
    graph = capture(plain, seeded_input((8, 3, 8, 7)))
    model = parallelize(plain, Plan.uniform(graph, 4, n=4), comm=comm, gradients=engine)
    out = model(seeded_input((8, 3, 8, 7))).sum()
    comm.sent.clear()
    out.backward()
    total = sum(p.numel() for p in model.parameters()) * 8
    sums = [sent.bytes for sent in comm.sent if sent.kind == "sum"]
    assert sum(sums) == total + 2 * 6 * 8  # and batch norm's statistics
    return sums


def test_chunks_are_summed_as_the_engine_says() -> None:
    counts = {
        engine.mode + str(engine.last or ""): len(shared_pool(4).run(_sums, engine)[0]) - 1
        for engine in ENGINES
        if engine.last != "auto" and engine.wait == "backward"
    }
    assert counts["end"] == 1
    # The linear layer that is used twice is summed once, the norm with the layer that it follows.
    assert counts["layer"] == 4
    assert counts["chunks1"] == counts["chunks3"] == 2
    assert 1 < counts["buckets"] <= 4


def _two_optimizers() -> Any:
    """Each waits for its own parameters; what none has is waited for before the next sums."""
    plain, x, y = seeded(Net()), seeded_input((8, 3, 8, 7)), torch.arange(8) % 4
    plan = Plan.uniform(capture(plain, x), 4, n=4)
    model = parallelize(plain, plan, gradients=Engine("layer", wait="step"))
    sets = [[p for n, p in model.named_parameters() if n.startswith(("conv", "norm"))]]
    sets.append([p for n, p in model.named_parameters() if n.startswith("head")])
    steppers = [torch.optim.SGD(own, lr=0.05, momentum=0.9) for own in sets]
    left = []
    for _ in range(5):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for stepper in steppers:
            stepper.step()
        left.append(len(model._shardwise.gradients.unfinished.pending))  # type: ignore[union-attr]
    return model.state_dict(), left


def test_optimizers_wait_for_their_own_parameters() -> None:
    plain, x, y = seeded(Net()), seeded_input((8, 3, 8, 7)), torch.arange(8) % 4
    own = [p for n, p in plain.named_parameters() if not n.startswith("twice")]
    stepper = torch.optim.SGD(own, lr=0.05, momentum=0.9)
    for _ in range(5):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        stepper.step()
    for state, left in shared_pool(4).run(_two_optimizers):
        assert left == [1] * 5  # of the layer that no optimizer has
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)


def _views() -> bool:
    plain = seeded(Net())
    graph = capture(plain, seeded_input((8, 3, 8, 7)))
    model = parallelize(plain, Plan.uniform(graph, 4, n=4), gradients=Engine("end"))
    places = []
    for _ in range(2):
        model(seeded_input((8, 3, 8, 7))).sum().backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])  # type: ignore[union-attr]
        model.zero_grad()
    return places[0] == places[1] and len(set(places[0])) == len(places[0])


def test_gradients_stay_in_one_place() -> None:
    assert all(shared_pool(4).run(_views))


def test_chunk_sizes() -> None:
    assert Engine("layer").chunks([1, 2, 3]) == [1, 1, 1]
    assert Engine("end").chunks([1, 2, 3]) == [3]
    assert Engine("chunks", last=2).chunks([1, 2, 3]) == [2, 1]
    assert Engine("buckets", bucket_bytes=3).chunks([1, 2, 3, 1]) == [2, 1, 1]
    assert Engine("layer").chunks([]) == []
    with pytest.raises(ValueError, match="mode 'soon' must be one of"):
        Engine("soon")
    with pytest.raises(ValueError, match="last 'some' must be a number of layers, or auto"):
        Engine("chunks", last="some")  # type: ignore[arg-type]
    assert [e.last for e in Engine("chunks", last="auto").choices(10)] == [1, 2, 4, 5, 7, 8, 10]
    assert Engine("end").choices(10) == [Engine("end")]


def _chosen() -> tuple[Any, bool]:
    plain, x = seeded(Net()), seeded_input((8, 3, 8, 7))
    plan = Plan.uniform(capture(plain, x), 4, n=4)
    model = parallelize(plain, plan, gradients=Engine("chunks", last="auto"))
    choice = model._shardwise.gradients.choice
    for _ in range(3 * len(choice.engines)):
        assert not choice.decided
        model(x).sum().backward()
    return choice.engine.last, choice.decided


def test_all_ranks_settle_on_the_same_k() -> None:
    found = shared_pool(4).run(_chosen)
    assert len(set(found)) == 1 and found[0][1]
