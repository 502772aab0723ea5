"""Models that are made on the meta device: their weights are loaded block by block, or refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from habits.habit import PLANS, Net, assert_same_script, assert_script_refused, image, net
from shardwise import ParallelModel, Plan, ShardwiseError, load_weights, of, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.model.capture import ModelGraphs

UNLOADED = r"'conv.weight' and \d+ others have no values: .* use shardwise.load_weights"


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net().double()


def steps(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(2):
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
    return losses


def trained(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What another training has left: running statistics and counters, too."""
    steps(model, x)
    return model.state_dict()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(trained(net(), image()), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def load(model: Any, file: Path) -> None:
    """As each kind of model is loaded."""
    if isinstance(model, ParallelModel):
        load_weights(model, file)
    else:
        model.load_state_dict(load_file(file), assign=True)


def test_a_model_made_on_meta_is_loaded_from_safetensors(file: Path) -> None:
    def script(wrap: Any) -> Any:
        model = wrap(on_meta(), image())
        load(model, file)
        return steps(model, image())

    assert_same_script(script)


def test_a_model_made_on_meta_loads_a_whole_state(file: Path) -> None:
    def script(wrap: Any) -> Any:
        model = wrap(on_meta(), image())
        model.load_state_dict(load_file(file), assign=True)
        losses = steps(model, image())
        return losses, nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    assert_same_script(script)


def test_parts_of_a_model_made_on_meta_are_loaded_by_themselves(file: Path) -> None:
    def script(wrap: Any) -> Any:
        model = wrap(on_meta(), image())
        assign = not isinstance(model, ParallelModel)
        for name, child in model.named_children():
            state = load_file(file).items()
            own = {k.removeprefix(f"{name}."): v for k, v in state if k.startswith(f"{name}.")}
            child.load_state_dict(own, assign=assign)
        return steps(model, image())

    assert_same_script(script)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: model(x),
        lambda model, x: model.state_dict(),
        lambda model, x: of(model).full_tensors(),
        lambda model, x: of(model).blocks(),
        lambda model, x: copy.deepcopy(model)(x),
        lambda model, x: AveragedModel(model)(x),
        lambda model, x: model.float()(x.float()),
        lambda model, x: model.to_empty(device="cpu")(x),
    ],
    ids=["forward", "state", "tensors", "blocks", "copy", "average", "cast", "to_empty"],
)
def test_weights_that_were_not_loaded_are_refused_by_name(use: Callable[..., Any]) -> None:
    refused(lambda model: use(model, image()), UNLOADED)


def refused(use: Callable[[Any], Any], sentence: str, build: Any = on_meta) -> None:
    """On every rank, and the ranks can go on."""
    graphs = ModelGraphs(build(), (tuple(image().shape),), (torch.float64,))

    def work(comm: Communicator, make: Any) -> bool:
        with pytest.raises(ShardwiseError, match=sentence):
            use(parallelize(build(), make(graphs(True, 4)), comm=comm, graphs=graphs))
        return len(comm.gather_objects(None)) == comm.size

    for world, make in PLANS.values():
        assert all(World(world).run(work, make))


def test_what_a_partial_state_leaves_without_values_is_named() -> None:
    def use(model: Any) -> Any:
        whole = net().state_dict()
        part = {name: value for name, value in whole.items() if name != "head.bias"}
        model.load_state_dict(part, strict=False)
        model(image())

    refused(use, "^'head.bias' has no values: .* nothing was loaded into it")


def test_weights_may_be_set_by_hand() -> None:
    def script(wrap: Any) -> Any:
        model = wrap(on_meta(), image())
        if not isinstance(model, ParallelModel):
            model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.constant_(param, 0.02)
        for buffer in model.buffers():
            buffer.fill_(1)
        return steps(model, image())

    assert_same_script(script)


class Scaled(Net):
    """With a buffer that is not in its state."""

    scale: torch.Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 3.0], **options), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale.view(3, 1, 1))


def test_a_buffer_that_cannot_be_loaded_is_refused_by_name() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Scaled().double()

    sentence = "buffer 'scale' was made on the meta device .* device='cpu'"
    refused(lambda model: model, sentence, build)


def test_a_buffer_that_was_made_on_a_device_keeps_its_values(file: Path) -> None:
    def script(wrap: Any) -> Any:
        with torch.device("meta"):
            model = Scaled(device="cpu").double()
        model = wrap(model, image())
        load(model, file)
        return steps(model, image())

    assert_same_script(script)


def test_a_tensor_on_meta_that_is_no_buffer_is_refused_by_name() -> None:
    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv.scale = torch.ones(1)  # type: ignore[assignment]

    def script(wrap: Any) -> Any:
        with torch.device("meta"):
            model = Plain().double()
        return wrap(model, image()) and None

    sentence = "the tensor 'conv.scale' was made on the meta device .* device='cpu'"
    assert_script_refused(script, sentence)


def test_ranks_without_values_get_those_of_rank_0() -> None:
    graphs = ModelGraphs(net(), (tuple(image().shape),), (torch.float64,))
    wanted = net().state_dict()

    def work(comm: Communicator, make: Any) -> bool:
        model = net() if comm.rank == 0 else on_meta()
        parallel = parallelize(model, make(graphs(True, 4)), comm=comm, graphs=graphs)
        return all(
            torch.equal(value, wanted[name]) for name, value in parallel.state_dict().items()
        )

    for world, make in PLANS.values():
        assert all(World(world).run(work, make))


def test_a_rank_that_has_nothing_waits_for_those_that_have(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).double()

    torch.manual_seed(0)
    save_file(build().state_dict(), tmp_path / "two.safetensors")
    graphs = ModelGraphs(build(), (tuple(image().shape),), (torch.float64,))
    plan = Plan.uniform(graphs(True, 4), 3, f=2)  # rank 2 has nothing to do

    def work(comm: Communicator) -> list[str]:
        with torch.device("meta"):
            model = build()
        parallel, heard = parallelize(model, plan, comm=comm, graphs=graphs), []
        for _ in range(2):
            for twin in (copy.deepcopy(parallel), parallel.double(), parallel):
                try:
                    heard.append(str(tuple(twin(image()).shape)))
                except ShardwiseError as error:
                    heard.append(str(error)[:36])
            load_weights(parallel, tmp_path / "two.safetensors")
        return heard

    refused, passed = "'0.weight' and 3 others have no value", "(4, 4, 2, 2)"
    for heard in World(3).run(work):
        assert heard == [refused[:36]] * 3 + [passed] * 3


def test_an_optimizer_of_a_model_on_meta_trains_the_parallel_one(file: Path) -> None:
    def script(wrap: Any) -> Any:
        if wrap.__name__ == "wrap":  # one device has no use for parameters without values
            model = net()
            model.load_state_dict(load_file(file))
            return steps(wrap(model, image()), image())
        model = on_meta()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model = wrap(model, image())
        load_weights(model, file)
        losses = []
        for _ in range(2):
            losses.append(model(image()).square().mean())
            losses[-1].backward()
            optimizer.step()
        return losses

    assert_same_script(script)


def test_the_original_may_be_dropped() -> None:
    def script(wrap: Any) -> Any:
        model = net()
        seen = [weakref.ref(param) for param in model.parameters()]
        parallel = wrap(model, image())
        del model
        losses = steps(parallel, image())
        gc.collect()
        alive = any(ref() is not None for ref in seen)
        return losses, alive and parallel is not None and isinstance(parallel, ParallelModel)

    assert_same_script(script)
