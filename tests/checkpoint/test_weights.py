"""Weights that every rank reads block by block, from whatever holds them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from exactness import seeded
from saving import SHAPE, Net
from shardwise import Plan, ShardwiseError, load_weights, parallelize
from shardwise.checkpoint import Checkpoints, safetensors_file
from shardwise.checkpoint.safetensors_file import read_box, read_header, runs
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.geometry.box import Box
from shardwise.model.capture import ModelGraphs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, torch.Tensor]
GRAPHS: list[ModelGraphs] = []
PLANS: dict[str, tuple[int, Callable[[Any], Plan]]] = {
    "f=2": (2, lambda graph: Plan.uniform(graph, 2, f=2)),
    "c=2": (2, lambda graph: Plan.uniform(graph, 2, c=2)),
    "random": (3, lambda graph: Plan.random(graph, 3, seed=1)),
}


def source() -> Net:
    return seeded(Net(), seed=7)  # type: ignore[return-value]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Net().double()
    model.hidden = torch.zeros(2, dtype=torch.float64)
    return model


def made(comm: Communicator, plan: str, build: Callable[[], nn.Module] = on_meta) -> Any:
    graphs = GRAPHS or [ModelGraphs(source(), (SHAPE,), (torch.float64,))]
    GRAPHS[:] = graphs
    chosen = PLANS[plan][1](graphs[0](True, SHAPE[0])) if comm.size > 1 else None
    chosen = chosen or Plan.uniform(graphs[0](True, SHAPE[0]), 1)
    return parallelize(build(), chosen, comm=comm, graphs=graphs[0])


def as_saved(state: State) -> State:
    """The format has no tied tensors."""
    return {name: tensor.clone() for name, tensor in state.items()}


def write_safetensors(folder: Path) -> Path:
    save_file(as_saved(source().state_dict()), folder / "net.safetensors")
    return folder / "net.safetensors"


def write_without_ties(folder: Path) -> Path:
    state = as_saved(source().state_dict())
    del state["fc1.weight"]
    save_file(state, folder / "net.safetensors")
    return folder / "net.safetensors"


def write_several(folder: Path) -> Path:
    names: dict[str, str] = {}
    for number, part in enumerate(("a.safetensors", "b.safetensors")):
        own = [pair for i, pair in enumerate(source().state_dict().items()) if i % 2 == number]
        save_file(as_saved(dict(own)), folder / part)
        names |= dict.fromkeys(dict(own), part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def write_torch(folder: Path) -> Path:
    torch.save(source().state_dict(), folder / "net.pt")
    return folder / "net.pt"


def write_checkpoint(folder: Path) -> Path:
    model = made(World(1).run(lambda comm: comm)[0], "", source)
    checkpoints = Checkpoints(folder / "run" / "checkpoints", comm=Communicator())
    checkpoints.save(3, model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    checkpoints.wait()
    return folder / "run"


WRITERS = [
    write_safetensors,
    write_without_ties,
    write_several,
    write_torch,
    write_checkpoint,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_rank_loads_its_blocks_from(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path, wanted = write(tmp_path), source().state_dict()

    def work(comm: Communicator, plan: str) -> State:
        model = made(comm, plan)
        load_weights(model, path)
        return model.state_dict()

    for plan, (world, _) in PLANS.items():
        for state in World(world).run(work, plan):
            assert list(state) == list(wanted)
            for name, value in wanted.items():
                assert torch.equal(state[name], value), (plan, name)


def test_a_rank_reads_no_more_than_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = write_safetensors(tmp_path), []

    def noted(*args: Any) -> torch.Tensor:
        read.append(args[-1].numel)
        return read_box(*args)

    monkeypatch.setattr("shardwise.checkpoint.weight_files.read_box", noted)

    def work(comm: Communicator) -> int:
        model = made(comm, "f=2")
        load_weights(model, path)
        tied = model.fc1.weight  # has two names in the file
        return sum(t.detach().nelement() for t in (*model.parameters(), *model.buffers(), tied))

    held = sum(World(2).run(work))
    hidden = 2 * 2  # elements that no file holds
    assert sum(read) == held - hidden


def test_nothing_is_loaded_on_any_rank_where_a_file_does_not_fit(tmp_path: Path) -> None:
    def without(state: State) -> None:
        del state["norm.weight"], state["head.bias"]

    def more(state: State) -> None:
        state["tail.weight"] = torch.zeros(3)

    def renamed(state: State) -> None:
        state["module.head.bias"] = state.pop("head.bias")

    def shape(state: State) -> None:
        state["head.weight"] = torch.zeros(4, 10, dtype=torch.float64)

    def dtype(state: State) -> None:
        state["head.weight"] = state["head.weight"].half()

    def untied(state: State) -> None:
        state["fc2.weight"] = state["fc2.weight"] + 1

    wrong: dict[Callable[[State], None], str] = {
        without: r"net.safetensors is of another model: it lacks 'norm.weight' and 1 other$",
        more: r"it has 'tail.weight', which this one has not",
        renamed: r"it lacks 'head.bias', and has 'module.head.bias', which this one has not",
        shape: r"net.safetensors: 'head.weight' is 4x10 float64, and 4x9 float64 in the model",
        dtype: r"net.safetensors: 'head.weight' is 4x9 float16, and 4x9 float64 in the model",
        untied: r"'fc1.weight' and 'fc2.weight' are one tensor in the model, and differ there",
    }
    for change, sentence in wrong.items():
        state = as_saved(source().state_dict())
        change(state)
        save_file(state, tmp_path / "net.safetensors")
        for plan, (world, _) in PLANS.items():
            for message in World(world).run(unchanged, plan, [tmp_path / "net.safetensors"] * 3):
                # a rank without any of the tied tensor has nothing to compare
                message = message.removeprefix("rank 0 refuses: ").removeprefix("rank 1 refuses: ")
                assert re.search(sentence, message), message


def unchanged(comm: Communicator, plan: str, paths: list[Path]) -> str:
    """The sentence that refuses each rank's file; its weights are as before."""
    model = made(comm, plan, lambda: seeded(Net(), seed=3))
    before = model.state_dict()
    with pytest.raises(ShardwiseError) as refusal:
        load_weights(model, paths[comm.rank])
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(refusal.value)


def test_files_that_differ_between_ranks_are_not_loaded(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        state = as_saved(seeded(Net(), seed=rank).state_dict())
        save_file(state, tmp_path / str(rank) / "net.safetensors")
        paths.append(tmp_path / str(rank) / "net.safetensors")
    for message in World(2).run(unchanged, "f=2", paths):
        assert message.startswith("rank 1 finds other weights in ")


def test_a_file_that_one_rank_cannot_read_is_named_to_all(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path)
    first, second = World(2).run(unchanged, "f=2", [path, tmp_path / "none.safetensors"])
    assert second == f"{tmp_path}/none.safetensors cannot be read: No such file or directory"
    assert first == f"rank 1 refuses: {second}"


@pytest.mark.parametrize("name", ["net.bin", "net", "no-folder/"])
def test_what_holds_no_weights_is_refused(tmp_path: Path, name: str) -> None:
    for message in World(2).run(unchanged, "f=2", [tmp_path / name] * 2):
        assert "is nothing that weights are read from" in message
    for message in World(2).run(unchanged, "f=2", [tmp_path] * 2):
        assert message == f"{tmp_path} holds no checkpoint and no weights"


def test_more_than_a_state_is_refused(tmp_path: Path) -> None:
    torch.save({"model": source().state_dict(), "epoch": 3}, tmp_path / "all.pt")
    for message in World(2).run(unchanged, "f=2", [tmp_path / "all.pt"] * 2):
        assert "holds more than the state of a model; give load_state_dict" in message


def test_a_part_of_the_weights_is_loaded_where_that_is_meant(tmp_path: Path) -> None:
    state = as_saved(source().state_dict()) | {"tail": torch.zeros(3)}
    del state["head.bias"]
    save_file(state, tmp_path / "part.safetensors")

    def work(comm: Communicator) -> State:
        model = made(comm, "random")
        load_weights(model, tmp_path / "part.safetensors", strict=False)
        with pytest.raises(ShardwiseError, match=r"^'head.bias' has no values"):
            model.state_dict()
        nn.init.zeros_(model.head.bias)
        return model.state_dict()

    wanted = source().state_dict() | {"head.bias": torch.zeros(4, dtype=torch.float64)}
    for found in World(3).run(work):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_checkpoint_goes_on_with_a_model_made_on_meta(tmp_path: Path) -> None:
    folder, alone = write_checkpoint(tmp_path) / "checkpoints", World(1).run(lambda comm: comm)[0]
    model = made(alone, "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(folder, comm=Communicator())
    with pytest.raises(ShardwiseError, match="'unused' and 17 others have no values"):
        checkpoints.save(4, model, optimizer, {})
    checkpoints.load(model, optimizer)
    for name, value in source().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


# -- files -----------------------------------------------------------------------------------------


@given(st.data())
def test_runs_are_where_a_box_lies_in_memory(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    stops = tuple(data.draw(st.integers(a + 1, b)) for a, b in zip(starts, shape, strict=True))
    box = Box(starts, stops)
    places = np.arange(int(np.prod(shape))).reshape(shape)[box.slices_in(Box.whole(shape))]
    found = [place + i for place, numel in runs(shape, box) for i in range(numel)]
    assert found == places.ravel().tolist()


@pytest.mark.parametrize("dtype", safetensors_file.SAFETENSORS.values(), ids=str)
def test_every_type_is_read_as_the_library_writes_it(tmp_path: Path, dtype: Any) -> None:
    x, path = (torch.arange(24).view(2, 3, 4) % 5).to(dtype), tmp_path / "x.safetensors"
    save_file({"x": x, "none": x[:0].clone(), "one": x[1, 0, 1].clone()}, path, {"a": "b"})
    entries, begin = read_header(path)
    box = Box((0, 1, 2), (2, 2, 4))
    assert torch.equal(read_box(path, entries["x"], begin, box), x[0:2, 1:2, 2:4])
    assert torch.equal(read_box(path, entries["one"], begin, Box.whole(())), x[1, 0, 1])
    assert read_box(path, entries["none"], begin, Box.whole((0, 3, 4))).shape == (0, 3, 4)


def test_damaged_files_are_refused_with_a_sentence_or_read(tmp_path: Path) -> None:
    path, dice = write_safetensors(tmp_path), random.Random(0)
    content = path.read_bytes()
    for _ in range(300):
        bad = bytearray(content)
        for _ in range(dice.randrange(1, 4)):
            bad[dice.randrange(600)] = dice.randrange(256)
        path.write_bytes(bad[: dice.choice([len(bad), dice.randrange(len(bad))])])
        try:
            entries, begin = read_header(path)
            for entry in entries.values():
                read_box(path, entry, begin, Box.whole(tuple(entry.shape)))
        except ShardwiseError as error:
            assert str(path) in str(error) and "\n" not in str(error)
