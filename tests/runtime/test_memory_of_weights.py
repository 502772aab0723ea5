"""What stays in memory beside a rank's blocks: nothing as large as the original was."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from exactness import seeded, seeded_input
from shardwise import Plan, capture, load_weights, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World

WIDE = 96
X = seeded_input((2, WIDE, 4, 4))


def wide() -> nn.Module:
    """Weights that are far larger than anything else here; one lies in memory as images may."""
    convs = [nn.Conv2d(WIDE, WIDE, 3, padding=1) for _ in range(3)]
    convs[1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return seeded(nn.Sequential(convs[0], nn.BatchNorm2d(WIDE), convs[1], nn.ReLU(), convs[2]))


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(X).square().mean().backward()
    optimizer.step()
    model.eval()(X)
    model.train()


def storages() -> dict[int, int]:
    """The bytes of all tensors of this process, each piece of memory once, by where it lies."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and type(value) is not Fake and not value.is_meta:
            with torch._C.DisableTorchFunctionSubclass():  # other tests' tensors may refuse
                storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def largest_new(before: dict[int, int], comm: Communicator) -> int:
    """The bytes of the largest tensor that other tests have not left, for all ranks by the first.

    Ranks are threads here, so that each would find the same.
    """
    comm.gather_objects(None)
    found = storages() if comm.rank == 0 else {}
    comm.gather_objects(None)
    return max((size for place, size in found.items() if before.get(place) != size), default=0)


Fake = torch._subclasses.fake_tensor.FakeTensor  # type: ignore[attr-defined]
WHOLE = WIDE * WIDE * 9 * 8


@pytest.mark.parametrize("change", [lambda model: model, lambda model: model.float().double()])
def test_the_original_is_freed_when_it_is_dropped(change: Any) -> None:
    before, plan = storages(), Plan.uniform(capture(wide(), X), 4, f=4)

    def work(comm: Communicator) -> list[Any]:
        original = wide()
        seen = [weakref.ref(p) for p in (*original.parameters(), *original.buffers())]
        model = parallelize(original, plan, comm=comm)
        step(model)
        del original
        change(model)
        step(model)
        held = largest_new(before, comm)
        alive = [ref for ref in seen if ref() is not None]
        return [len(alive), held, len(model.state_dict())]

    for alive, largest, _ in World(4).run(work):
        assert alive == 0
        assert largest <= WHOLE // 4


def test_a_model_made_on_meta_has_no_more_than_its_blocks(tmp_path: Path) -> None:
    plan, file = Plan.uniform(capture(wide(), X), 4, f=4), tmp_path / "wide.safetensors"
    save_file({name: x.contiguous() for name, x in wide().state_dict().items()}, file)
    before = storages()

    def work(comm: Communicator) -> int:
        with torch.device("meta"):
            model = wide()
        parallel = parallelize(model, plan, comm=comm)
        made = largest_new(before, comm)
        load_weights(parallel, file)
        step(parallel)
        trained = largest_new(before, comm)
        return max(made, trained)

    assert max(World(4).run(work)) <= WHOLE // 4


def test_no_second_copy_of_the_whole_weights_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank packs, sends and cuts so many weights at a time."""
    monkeypatch.setattr("shardwise.runtime.splitting.PACKET", WHOLE)
    plan = Plan.uniform(capture(wide(), X), 2, f=2)

    def work(comm: Communicator) -> int:
        model, sent = wide(), []
        broadcast = comm.broadcast
        monkeypatch.setattr(comm, "broadcast", lambda x: sent.append(x.nbytes) or broadcast(x))
        parallelize(model, plan, comm=comm)
        return max(sent)

    assert max(World(2).run(work)) <= WHOLE + 8 * WIDE * 9
