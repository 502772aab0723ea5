"""Process groups as users make them: without a backend, and of some ranks only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from exactness import seeded
from shardwise import Plan, capture, parallelize, run_local
from shardwise.comm import About, Communicator
from shardwise.errors import ShardwiseError


def _anew(backend: str | None) -> tuple[str, torch.Tensor, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    comm = Communicator()
    model = seeded(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)))
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    comm.all_reduce((0, 1), torch.ones(3, dtype=torch.bfloat16), About("numbers")).wait()
    parallel = parallelize(model, Plan.uniform(capture(model, x), h=2), comm=comm)
    return comm.backend, parallel(x).detach(), model(x).detach()


def test_a_group_without_a_named_backend_is_known_by_its_devices() -> None:
    for backend in (None, "cpu:gloo"):
        for found, parallel, plain in run_local(_anew, 2, backend):
            assert found == "gloo"
            torch.testing.assert_close(parallel, plain, rtol=1e-12, atol=1e-12)


def _of_some() -> str:
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return ""
    try:
        Communicator(group)
    except ShardwiseError as error:
        return str(error)
    return "no error"


def test_a_group_of_some_ranks_is_refused_and_nobody_waits() -> None:
    first, second, third = run_local(_of_some, 3)
    assert "all 3 ranks, and this group has 2" in first and first == second and not third
