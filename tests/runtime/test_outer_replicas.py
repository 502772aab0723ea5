"""DDP or FSDP2 over one axis of a mesh, around a model that is parallel over the other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shardwise import Engine, Plan, ShardwiseError, capture, of, optimizer, parallelize, run_local

REPLICAS, STEPS = 2, 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1),
        nn.Flatten(), nn.Linear(6 * 7 * 8, 5),
    ).double()  # fmt: skip


def samples(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step * REPLICAS + replica)
    x = torch.randn(3, 3, 7, 8, generator=draw, dtype=torch.float64)
    return x, torch.randint(5, (3,), generator=draw)


def of_one_device() -> dict[str, torch.Tensor]:
    """Trained on the mean of the replicas' losses."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(REPLICAS):
            x, labels = samples(step, replica)
            (cross_entropy(model(x), labels) / REPLICAS).backward()
        optimizer.step()
    return model.state_dict()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}


def trained(outside: str, split: dict[str, int]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (REPLICAS, 2), mesh_dim_names=("data", "domain"))
    model = network()
    plan = Plan.uniform(capture(model, samples(0, 0)[0]), **split)
    inside = parallelize(model, plan, mesh=mesh["domain"])
    parallel: Any = inside
    if outside == "ddp":
        parallel = DistributedDataParallel(inside, process_group=mesh["data"].get_group())
    else:
        fully_shard(inside, mesh=mesh["data"])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, labels = samples(step, mesh["data"].get_local_rank())
        optimizer.zero_grad()
        cross_entropy(parallel(x), labels).backward()
        optimizer.step()
    return whole(inside.state_dict())


@pytest.mark.parametrize(
    ("outside", "split"), [("ddp", {"h": 2}), ("ddp", {"f": 2}), ("fsdp2", {"h": 2})]
)
def test_replicas_of_a_parallel_model_train_as_one_device_on_the_mean_of_their_losses(
    outside: str, split: dict[str, int]
) -> None:
    expected = of_one_device()
    for state in run_local(trained, 4, outside, split):
        for name, x in expected.items():
            assert float((state[name] - x).abs().max()) <= 1e-10, name


def refusal() -> str:
    try:
        trained("fsdp2", {"f": 2})
    except ShardwiseError as error:
        return str(error)
    return ""


def test_fsdp2_over_weights_that_the_plan_splits_is_refused() -> None:
    for sentence in run_local(refusal, 4):
        assert "'0.weight'" in sentence and "DDP" in sentence


def delayed(outside: str, wait: str) -> dict[str, torch.Tensor]:
    """Trained with gradients, and updates, that would come after the backward pass."""
    mesh = init_device_mesh("cpu", (REPLICAS, 2), mesh_dim_names=("data", "domain"))
    model = network()
    plan = Plan.uniform(capture(model, samples(0, 0)[0]), h=2)
    engine: Any = Engine("layer", wait=wait)  # type: ignore[arg-type]
    inside = parallelize(model, plan, mesh=mesh["domain"], gradients=engine)
    parallel: Any = inside
    if outside == "ddp":
        parallel = DistributedDataParallel(inside, process_group=mesh["data"].get_group())
    else:
        fully_shard(inside, mesh=mesh["data"])
    stepping = optimizer(inside, torch.optim.SGD, lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, labels = samples(step, mesh["data"].get_local_rank())
        stepping.zero_grad()
        cross_entropy(parallel(x), labels).backward()
        stepping.step()
    return whole(inside.state_dict())


@pytest.mark.parametrize("outside", ["ddp", "fsdp2"])
@pytest.mark.parametrize("wait", ["step", "use"])
def test_gradients_that_would_come_later_are_there_before_replicas_average_them(
    outside: str, wait: str
) -> None:
    expected = of_one_device()
    for state in run_local(delayed, 4, outside, wait):
        for name, x in expected.items():
            assert float((state[name] - x).abs().max()) <= 1e-10, name


def accumulated(held: str, split: dict[str, int]) -> dict[str, torch.Tensor]:
    """Two passes per step; the first under no_sync() of DDP, of the model inside, or of both."""
    mesh = init_device_mesh("cpu", (REPLICAS, 2), mesh_dim_names=("data", "domain"))
    model = network()
    plan = Plan.uniform(capture(model, samples(0, 0)[0]), **split)
    inside = parallelize(model, plan, mesh=mesh["domain"])
    ddp = DistributedDataParallel(inside, process_group=mesh["data"].get_group())
    stepping = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        stepping.zero_grad()
        with ExitStack() as first:
            if held in ("ddp", "both"):
                first.enter_context(ddp.no_sync())
            if held in ("inside", "both"):
                first.enter_context(of(inside).no_sync())
            x, labels = samples(2 * step, mesh["data"].get_local_rank())
            (cross_entropy(ddp(x), labels) / 2).backward()
        x, labels = samples(2 * step + 1, mesh["data"].get_local_rank())
        (cross_entropy(ddp(x), labels) / 2).backward()
        stepping.step()
    return whole(inside.state_dict())


def accumulated_by_one_device() -> dict[str, torch.Tensor]:
    model = network()
    stepping = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        stepping.zero_grad()
        for half in range(2):
            for replica in range(REPLICAS):
                x, labels = samples(2 * step + half, replica)
                (cross_entropy(model(x), labels) / (2 * REPLICAS)).backward()
        stepping.step()
    return model.state_dict()


@pytest.mark.parametrize("held", ["ddp", "inside", "both"])
@pytest.mark.parametrize("split", [{"h": 2}, {"f": 2}], ids=["h", "f"])
def test_accumulation_over_replicas_is_that_of_one_device(held: str, split: dict[str, int]) -> None:
    expected = accumulated_by_one_device()
    for state in run_local(accumulated, 4, held, split):
        for name, x in expected.items():
            assert float((state[name] - x).abs().max()) <= 1e-10, name
