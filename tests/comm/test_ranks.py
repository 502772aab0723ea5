"""Process groups as users make them: without a backend, or with one per device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from exactness import seeded
from shardwise import Plan, capture, parallelize, run_local
from shardwise.comm import About, Communicator


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
