"""A parallel model hides nothing of the model it was made from."""

from __future__ import annotations

import copy
import io
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from exactness import seeded, seeded_input
from shardwise import ParallelModel, Plan, ShardwiseError, capture, parallelize
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.runtime.handle import Handle
from shardwise.runtime.parallel import PUBLIC

SHAPE = (4, 3, 6, 6)


def alone(plain: nn.Module, *inputs: torch.Tensor) -> Any:
    return parallelize(plain, Plan.uniform(capture(plain, *inputs)))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Colliding(nn.Module):
    """Children, parameters, buffers, attributes and methods with the names of ours."""

    num_classes = 5

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.plan, self.norms = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.comm = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("layout", torch.full((4, 1, 1), 2.0))
        self.record, self.full_tensors = "a note", [1, 2]
        self.head = nn.Linear(4, self.num_classes)

    def flush(self) -> str:
        return "done"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms(self.plan(self.blocks(x))).relu() * self.comm + self.layout
        return self.head(x.mean((2, 3)))

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(1) + self.forward(x).argmax(1)


def test_every_name_of_ours_is_free_for_the_model_and_always_in_the_handle() -> None:
    plain, x = seeded(Colliding()), seeded_input(SHAPE)
    model = alone(plain, x)
    assert isinstance(model, Colliding) and isinstance(model, ParallelModel)
    assert isinstance(model.plan, nn.Conv2d) and isinstance(model.blocks[0], nn.Conv2d)
    assert isinstance(model.comm, nn.Parameter) and model.record == "a note"
    assert model.flush() == "done" and model.num_classes == 5 and model.full_tensors == [1, 2]
    handle = shardwise.of(model)
    assert isinstance(handle, Handle) and handle.plan.world == handle.comm.size == 1
    assert set(handle.blocks()) == {*plain.state_dict()} - {"norms.num_batches_tracked"}
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    with pytest.raises(AttributeError, match="'ParallelColliding' object has no attribute 'nope'"):
        model.nope  # noqa: B018


def test_a_model_with_our_names_trains_as_alone() -> None:
    x = seeded_input(SHAPE)

    def train(model: Any, steps: int = 3) -> Any:
        stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            model(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        return model.eval()

    plain = train(seeded(Colliding()))

    def work(comm: Communicator) -> Any:
        first = seeded(Colliding())
        plan = Plan.uniform(capture(first, x), n=2, f=2)
        model = train(parallelize(first, plan, comm=comm))
        return model.state_dict(), model.predict(x)

    for state, classes in World(4).run(work):
        assert torch.equal(classes, plain.predict(x))
        for name, tensor in plain.state_dict().items():
            close(state[name].double(), tensor.double())


def test_our_members_are_the_models_where_it_has_none_of_that_name() -> None:
    model = alone(seeded(nn.Sequential(nn.Conv2d(3, 4, 3))), seeded_input(SHAPE))
    assert all(hasattr(model, name) for name in PUBLIC) and set(dir(model)) >= PUBLIC
    assert model.plan is shardwise.of(model).plan
    assert float(model.clip_grad_norm_(1.0)) == 0.0
    with pytest.raises(ShardwiseError, match="a Linear that parallelize has not made has no plan"):
        shardwise.of(nn.Linear(1, 1))
    with pytest.raises(ShardwiseError, match="it is parallel already"):
        parallelize(model, model.plan)


def test_a_sequence_stays_one() -> None:
    plain = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    x = seeded_input(SHAPE)
    model = alone(plain, x)
    assert len(model) == 3 and isinstance(model[0], nn.Conv2d)
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.ReLU, nn.Conv2d]
    close(model[:2](x), plain[:2](x))
    close(model[0](x), plain[0](x))


@pytest.mark.parametrize("split", [{"f": 2}, {"c": 2}, {"n": 2}, {"h": 2}])
def test_a_module_whose_parameters_are_split_is_not_called_by_itself(split: Any) -> None:
    plain, x = seeded(Colliding()), seeded_input(SHAPE)

    def work(comm: Communicator) -> Any:
        model = parallelize(plain, Plan.uniform(capture(plain, x), **split), comm=comm)
        try:
            return model.blocks(x)
        except ShardwiseError as error:
            return str(error)

    for found in World(2).run(work):
        if set(split) & {"f", "c"}:
            assert found.startswith("module 'blocks.0' of a parallel model cannot be called by")
        else:
            close(found, plain.blocks(x))


# -- copies ----------------------------------------------------------------------------------------


def test_an_average_of_weights_is_that_of_one_device() -> None:
    x = seeded_input(SHAPE)

    def train(model: Any) -> Any:
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
        stepper = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            model(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
            mean.update_parameters(model)
        return mean.eval()(x), mean.module.state_dict()

    expected, state = train(seeded(Colliding()))

    def work(comm: Communicator) -> Any:
        plain = seeded(Colliding())
        return train(parallelize(plain, Plan.uniform(capture(plain, x), n=2, f=2), comm=comm))

    for y, found in World(4).run(work):
        close(y, expected)
        for name, tensor in state.items():
            close(found[name].double(), tensor.double())


def test_a_copy_has_tensors_of_its_own() -> None:
    x = seeded_input(SHAPE)
    model = alone(seeded(Colliding()), x)
    model(x).sum().backward()
    twin, shallow = copy.deepcopy(model), copy.copy(model)
    with torch.no_grad():
        model.head.bias.add_(1.0)
    model.eval(), twin.eval()
    close(twin(x) + 1, model(x))
    close(shallow.eval()(x), model(x))
    assert twin.record == "a note" and twin.head.bias.grad is not model.head.bias.grad
    twin.train()(x).sum().backward()


def test_a_parallel_model_is_not_pickled() -> None:
    model = alone(seeded(Colliding()), seeded_input(SHAPE))
    with pytest.raises(ShardwiseError, match="cannot be pickled; save its state_dict"):
        torch.save(model, io.BytesIO())


# -- how a model is called -------------------------------------------------------------------------


class Asked(nn.Module):
    """Arguments of its own, one of them with the name of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(
        self, batch: torch.Tensor, mask: Any = None, scale: float = 2.0, extra: Any = None
    ) -> torch.Tensor:
        y = self.conv(batch) * scale
        y = y if mask is None else y * mask
        return y if extra is None else y + extra


def test_inputs_may_be_given_by_name() -> None:
    plain, x, mask = seeded(Asked()), seeded_input(SHAPE), seeded_input((4, 3, 1, 1))
    model = alone(plain, x, mask)
    expected = plain(x, mask)
    for found in (
        model(x, mask), model(batch=x, mask=mask), model(mask=mask, batch=x), model(x, mask, 2.0),
        shardwise.of(model).forward(x, mask, batch=4),
    ):  # fmt: skip
        close(found, expected)
    with pytest.raises(ShardwiseError, match=r"argument 'scale' is 3.0, and must be a tensor"):
        model(x, mask, scale=3.0)
    with pytest.raises(ShardwiseError, match="argument 'batch' is None, and must be a tensor"):
        model(mask=mask, batch=None)
    with pytest.raises(ShardwiseError, match=r"cannot be called like this: .*'masks'"):
        model(x, masks=mask)
    with pytest.raises(ShardwiseError, match="argument 'extra' is given without 'scale'"):
        model(x, mask, extra=x)
    with pytest.raises(ShardwiseError, match="takes 2 input tensors, and got 1"):
        model(x)


def test_the_number_of_samples_of_parts_is_a_number() -> None:
    model = alone(seeded(nn.Sequential(nn.Conv2d(3, 4, 3))), seeded_input(SHAPE))
    x = seeded_input(SHAPE)
    assert model(x, batch=4).shape == (4, 4, 4, 4)
    for wrong in (x, True, -1, 4.0):
        with pytest.raises(ShardwiseError, match="must be the number of samples of all parts"):
            model(x, batch=wrong)


# -- models that are more than a tree of modules ---------------------------------------------------


class Entry(nn.Module):
    """Its forward finds modules in plain lists, dictionaries and bound methods."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.stages, self.named = [self.a, (self.b,)], {"last": self.c}
        self.last = self.c.forward
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.named["last"](self.stages[1][0](self.stages[0](x))))


def test_modules_in_plain_lists_are_the_models_own() -> None:
    plain, x = seeded(Entry()), seeded_input((4, 4))
    model = alone(plain, x)
    model(x).sum().backward(), plain(x).sum().backward()
    for (name, param), (_, other) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert param is not other, name
        close(param.grad, other.grad)
    assert model.stages[0] is model.a and model.named["last"] is model.c
    model.seen.append(1)
    assert plain.seen == []


def test_parametrized_and_patched_models_run() -> None:
    x = seeded_input(SHAPE)
    plain = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU())
    close(alone(seeded(plain), x)(x), plain(x))
    patched = seeded(nn.Conv2d(3, 4, 3))
    patched.forward = types.MethodType(lambda self, x: 2 * nn.Conv2d.forward(self, x), patched)
    close(alone(patched, x)(x), patched(x))


class FrozenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def test_the_models_own_way_to_train_stays() -> None:
    plain, x = seeded(FrozenNorm()).train(), seeded_input(SHAPE)
    model = alone(plain, x).train()
    close(model(x), plain(x))
    assert model.training and not model.norm.training
    assert float(model.norm.num_batches_tracked) == 0


class Parent(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 3, 1).double(), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.stem(x))


def test_a_parallel_part_of_a_model_saves_and_loads_with_it() -> None:
    x = seeded_input(SHAPE)
    other = seeded(Parent(Colliding()), seed=3)

    def work(comm: Communicator) -> Any:
        body = seeded(Colliding())
        plan = Plan.uniform(capture(body, x), f=2)
        parent = Parent(parallelize(body, plan, comm=comm))
        parent.load_state_dict(other.state_dict())
        wrong = other.state_dict() | {"body.blocks.0.weight": torch.zeros(8, 3, 3, 3)}
        with pytest.raises(RuntimeError, match=r"the shape in current model is .*4, 3, 3, 3"):
            parent.load_state_dict(wrong)
        parent.load_state_dict(other.state_dict(), assign=True)
        return parent.eval()(x), parent.state_dict()

    for y, state in World(2).run(work):
        close(y, other.eval()(x))
        assert [*state] == [*other.state_dict()]
        assert all(torch.equal(state[name], t) for name, t in other.state_dict().items())


def test_hooks_that_would_never_run_and_modules_that_would_never_be_used_are_refused() -> None:
    x = seeded_input(SHAPE)
    model = alone(seeded(Colliding()), x)
    for register in (
        model.blocks[0].register_forward_hook,
        model.norms.register_forward_pre_hook,
        model.head.register_full_backward_hook,
    ):
        with pytest.raises(ShardwiseError, match=r"a hook of module '.*' would never run"):
            register(lambda *_: None)
    for change in (
        lambda: setattr(model, "head", nn.Linear(4, 3)),
        lambda: model.blocks.append(nn.ReLU()),
        lambda: delattr(model, "norms"),
    ):
        with pytest.raises(ShardwiseError, match="is parallel: change the modules of the original"):
            change()
    seen: list[Any] = []
    model.register_forward_hook(lambda _, inputs, y: seen.append(y.shape))
    model.register_full_backward_hook(lambda *_: seen.append("back"))
    copy.deepcopy(model)(x).sum().backward()
    assert seen == [(4, 5), "back"]


def test_a_compiled_parallel_model_is_the_parallel_model() -> None:
    plain, x = seeded(Colliding()), seeded_input(SHAPE)
    model = alone(plain, x)
    compiled: Any = torch.compile(model)
    close(compiled(x), plain(x))
    compiled(x).sum().backward()
    assert model.head.weight.grad is not None
