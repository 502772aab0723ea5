"""DDP or FSDP2 over one axis of a mesh, around a model that is parallel over the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shardwise import Plan, ShardwiseError, capture, parallelize, run_local

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
