"""One rank of several on one GPU, over NCCL: python nccl_ranks.py WHAT RANK WORLD PORT [NAME ...].

Every process names itself another host, which NCCL lets share a card: good for exactness only, as
ranks take turns.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from shardwise import Plan, capture, of, parallelize, zoo
from shardwise.comm import Communicator
from shardwise.graph.layer_graph import LayerGraph
from shardwise.verify import compare

# As small as leaves batch norm several values per channel in the last layers.
SIZES = {"inception_v3": 139, "densenet121": 96, "googlenet": 96, "unet3d": 16, "digits": 8}
SPLITS = ({"n": 4}, {"h": 4}, {"w": 4}, {"f": 4}, {"c": 4})
BF16 = torch.bfloat16


def join(rank: int, world: int, port: int) -> None:
    os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = f"host-{rank}", "lo"
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    limit = timedelta(seconds=300)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit)


def plans_of(graph: LayerGraph, world: int) -> Iterator[tuple[str, Plan]]:
    for split in SPLITS:
        yield str(split), Plan.uniform(graph, world, **split)
    for seed in range(2):
        yield f"random {seed}", Plan.random(graph, world, seed)


def small_input(name: str, world: int) -> torch.Tensor:
    batch, channels, *space = zoo.input_shape(name, world)
    side = min(space[0], SIZES.get(name, 64))
    torch.manual_seed(1)
    return torch.randn(batch, channels, *[side] * len(space), dtype=torch.float64, device="cuda")


def exact(name: str, comm: Communicator) -> list[str]:
    """What differs from one device in float64, by plan."""
    torch.manual_seed(0)
    model, x = zoo.build(name).double().cuda(), small_input(name, comm.size)
    graph, wrong = capture(model, x), []
    for label, plan in plans_of(graph, comm.size):
        found = compare(model, plan, (x,), comm)
        wrong += [f"{label}: {each}" for each in found if not each.passed]
    return wrong


def trained(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients of a pass under autocast, in channels_last."""
    torch.manual_seed(2)
    with torch.autocast("cuda", BF16):
        made = model(x)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        loss = sum(y.float().square().mean() for y in outputs)
    loss.backward()
    if "_shardwise" in vars(model):
        gradients = of(model).full_gradients()
    else:
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"output": outputs[0].detach().float(), **gradients}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the differences of all tensors, by the norm of all."""
    total = sum(float(t.double().square().sum()) for t in one.values())
    apart = sum(float((one[k].double() - other[k].double()).square().sum()) for k in one)
    return (apart / total) ** 0.5


def lowered(name: str, comm: Communicator) -> list[str]:
    """Where 16 bits are further from one device than that is from itself in another order."""
    torch.manual_seed(0)
    model = zoo.build(name).cuda().to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # samples in another order would have other masks
    x = small_input(name, 2 * comm.size).float().contiguous(memory_format=torch.channels_last)
    one, other = trained(copy.deepcopy(model), x), trained(copy.deepcopy(model), x.flip(0))
    other["output"] = other["output"].flip(0)
    spread, graph, wrong = distance(one, other), capture(model, x), []
    for label, plan in plans_of(graph, comm.size):
        apart = distance(one, trained(parallelize(copy.deepcopy(model), plan), x))
        if comm.rank == 0:
            print(
                f"{name} {label}: {apart:.2e}, one device against itself {spread:.2e}", flush=True
            )
        if not apart <= 2 * spread + 2e-3:
            wrong.append(f"{label}: {apart:.2e} from one device, whose own spread is {spread:.2e}")
    return wrong


def main() -> None:
    what, rank, world, port, *names = sys.argv[1:]
    join(int(rank), int(world), int(port))
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    comm, check, failed = Communicator(), {"exact": exact, "lowered": lowered}[what], False
    for name in names or zoo.names():
        wrong = check(name, comm)
        failed |= bool(wrong)
        if comm.rank == 0:
            print(
                name, "; ".join(wrong[:3]) or "is exact" if what == "exact" else wrong, flush=True
            )
    dist.destroy_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
