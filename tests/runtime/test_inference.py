"""Inference: without gradients, for one sample, with outputs where they are wanted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exactness import seeded, seeded_input
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.errors import ShardwiseError
from shardwise.model.capture import capture
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import ParallelModel, parallelize


def net() -> nn.Module:
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5)
    return seeded(nn.Sequential(*layers, nn.Conv2d(6, 4, 3))).eval()


X = seeded_input((1, 3, 9, 7))


def on_ranks(plan: Plan, output: str, model: nn.Module) -> list[torch.Tensor | None]:
    """What every rank gets."""

    def work(comm: Communicator) -> torch.Tensor | None:
        parallel = parallelize(model, plan, comm=comm, output=output)  # type: ignore[arg-type]
        with torch.inference_mode():
            return parallel.eval()(X)

    return World(plan.world).run(work)


@pytest.mark.parametrize("split", [{"h": 3}, {"w": 2}, {"f": 2}, {"c": 2}])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_are_on_all_ranks_on_one_or_in_parts(split: dict[str, int], training: bool) -> None:
    model = net()
    expected = model(X)
    plan = Plan.uniform(capture(model, X, training=training), **split)
    assert plan.training == training
    for y in on_ranks(plan, "full", model):
        torch.testing.assert_close(y, expected)
    first, *others = on_ranks(plan, "one", model)
    torch.testing.assert_close(first, expected)
    assert all(other is None for other in others)
    parts = [y for y in on_ranks(plan, "local", model) if y is not None and y.numel()]
    assert sum(part.numel() for part in parts) == expected.numel()


def test_an_output_on_one_rank_has_no_gradients() -> None:
    model = net()
    plan = Plan.uniform(capture(model, X), h=2)

    def work(comm: Communicator) -> None:
        parallelize(model, plan, comm=comm, output="one")(X)

    with pytest.raises(ShardwiseError, match="output='one' is for inference"):
        World(2).run(work)


def test_parts_of_inputs_are_known_without_a_capture_for_training() -> None:
    class Evaluated(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training, "this is for evaluation"
            return super().forward(x)

    model = seeded(Evaluated(3, 4, 3)).eval()
    plan = Plan.uniform(capture(model, X, training=False), h=3)

    def work(comm: Communicator) -> int:
        parallel = parallelize(model, plan, comm=comm, output="local").eval()
        return parallel.input_box((1, 3, 16, 7)).shape[2] + 100 * parallel.output_box(1).shape[2]

    assert World(3).run(work) == [205, 205, 306]


def test_a_model_planned_for_inference_can_be_trained() -> None:
    model = net()
    plan = Plan.uniform(capture(model, X, training=False), h=2)
    x = seeded_input((2, 3, 9, 7))

    def work(comm: Communicator) -> ParallelModel:
        torch.manual_seed(0)
        parallel = parallelize(model, plan, comm=comm).train()
        parallel(x).sum().backward()
        return parallel[0].weight.grad  # type: ignore[return-value]

    torch.manual_seed(0)
    model.train()(x).sum().backward()
    for gradient in World(2).run(work):
        torch.testing.assert_close(gradient, model[0].weight.grad)  # type: ignore[index]
