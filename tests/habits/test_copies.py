"""Copies of a parallel model, what is called with other weights, and what is written to files."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from exactness import seeded
from habits.habit import Net, assert_refused, assert_same, image, net
from shardwise import Plan, capture, parallelize
from shardwise.comm.in_process import InProcess, World


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_deep_copy_trains_apart_from_what_it_was_copied_from() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        step(model, x)
        twin = copy.deepcopy(model)
        losses = [step(twin, x), step(model, 2 * x), step(twin, x)]
        return losses, dict(twin.state_dict())

    assert_same(use)


def test_a_state_that_was_kept_is_put_back() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        best = copy.deepcopy(model.state_dict())
        step(model, x)
        other = model(x)
        model.load_state_dict(best)
        return other, model(x)

    assert_same(use)


def test_a_state_is_written_and_read_whole() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        step(model, x)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "epoch": 3}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    assert_same(use)


def test_saving_the_original_after_the_parallel_model_was_trained_is_warned_of() -> None:
    original, x = net(), image()

    def work(comm: InProcess) -> None:
        model = parallelize(original, Plan.uniform(capture(original, x), f=2), comm=comm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            original.state_dict(), copy.deepcopy(original).state_dict()
        step(model, x)
        if comm.rank == 0:
            with pytest.warns(UserWarning, match="the weights from before parallelize"):
                original.state_dict()
            copied = pickle.loads(pickle.dumps(original._state_dict_pre_hooks))
            assert all(hook(original, "", False) == "" for hook in copied.values())
        model.state_dict()

    World(2).run(work)
    gc.collect()
    with warnings.catch_warnings():  # the parallel models are gone, and their hooks say nothing
        warnings.simplefilter("error")
        original.state_dict()
    model = parallelize(
        original, Plan.uniform(capture(original, x), 1), comm=InProcess(World(1), 0)
    )
    assert len(original._state_dict_pre_hooks) == 1 and not model._state_dict_pre_hooks


@pytest.mark.parametrize("write", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_pickling_a_parallel_model_is_refused(write: Any) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

        def __reduce__(self) -> Any:  # a class within a function; one device can pickle others
            return nn.Identity, ()

    sentence = r"cannot be pickled; save its state_dict\(\), which is whole"
    assert_refused(lambda model, x: write(model), sentence, build=lambda: seeded(Small()))


def test_pickling_the_split_weights_of_one_rank_is_refused() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        torch.save(dict(model.named_parameters()), io.BytesIO())

    assert_refused(use, "is one rank's block and cannot be pickled", under=["f=2"])


def test_a_model_can_be_called_with_other_weights() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        weights = {name: param * 0.5 for name, param in model.named_parameters()}
        y = functional_call(model, weights, (x,))
        y.square().sum().backward()
        return y, model(x)

    assert_same(use)


def test_whole_weights_are_refused_where_a_rank_needs_blocks() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        weights = {name: value * 0.5 for name, value in model.state_dict().items()}
        return functional_call(model, weights, (x,))

    assert_same(use, under=["n=2", "h=2"])
    assert_refused(use, "parameters of other", under=["f=2"])


def test_compiling_a_parallel_model_leaves_it_as_it_is() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        compiled = torch.compile(model, backend="eager")
        loss = compiled(x).square().mean()
        loss.backward()
        return loss

    assert_same(use, under=["n=2", "f=2"])


def with_weight_norm() -> nn.Module:
    net = seeded(Net())
    parametrizations.weight_norm(net.conv)
    parametrizations.weight_norm(net.head)
    return net


def test_weight_norm_trains_as_on_one_device() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        return [step(model, x) for _ in range(3)], model.conv.parametrizations.weight[0].dim

    assert_same(use, build=with_weight_norm)


def test_spectral_norm_is_refused_in_training() -> None:
    def build() -> nn.Module:
        net = seeded(Net())
        parametrizations.spectral_norm(net.head)
        return net

    assert_refused(step, "writes into its argument 'out'", build=build)
