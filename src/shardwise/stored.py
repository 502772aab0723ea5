"""The tensors a module stores: this rank's blocks of them, and the whole ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from shardwise.box import Box
from shardwise.comm import About, Communicator
from shardwise.exchange import carry
from shardwise.layout import Layout
from shardwise.transfer import Transfer


def weightless(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of the same shape that takes no memory; a copy of a buffer (export writes it)."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.clone()
    return nn.Parameter(tensor.detach().new_zeros(()).expand(tensor.shape), tensor.requires_grad)


def copy_structure(module: nn.Module, memo: dict[int, nn.Module] | None = None) -> nn.Module:
    """The same modules with their own tables of tensors and children; tensors are shared."""
    memo = {} if memo is None else memo
    if id(module) not in memo:
        twin = memo[id(module)] = copy.copy(module)
        twin.__dict__ = dict(module.__dict__)
        twin._parameters = dict(module._parameters)
        twin._buffers = dict(module._buffers)
        twin._modules = {
            name: copy_structure(child, memo) if child is not None else None
            for name, child in module._modules.items()
        }
    return memo[id(module)]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def resolve(root: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(root.get_submodule(path), leaf)


def assign(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    table = module._parameters if leaf in module._parameters else module._buffers
    table[leaf] = tensor  # type: ignore[assignment]


def from_root(tensors: list[torch.Tensor], comm: Communicator) -> list[torch.Tensor]:
    """Copies of rank 0's tensors, sent packed: small messages waste bandwidth (P5)."""
    copies = [tensor.detach().clone() for tensor in tensors]
    kinds = {(t.dtype, t.device) for t in copies}
    for kind in sorted(kinds, key=str) if comm.size > 1 else ():
        alike = [t for t in copies if (t.dtype, t.device) == kind]
        for bucket in _buckets(alike, num_bytes=64 << 20):
            packed = torch.cat([t.reshape(-1) for t in bucket])
            comm.broadcast(packed).wait()
            for t, part in zip(bucket, packed.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view(t.shape))
    return copies


def _buckets(tensors: list[torch.Tensor], num_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of together about this many bytes."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(t.numel() * t.element_size() for t in bucket) >= num_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def block_of(full: torch.Tensor, layout: Layout | None, rank: int) -> torch.Tensor:
    """This rank's block of a whole tensor; without a layout, all of it."""
    if layout is None or full.ndim == 0 or not full.numel():
        return full
    box = layout[rank]
    return (
        full
        if box == Box.whole(tuple(full.shape))
        else full[box.slices_in(Box.whole(tuple(full.shape)))].clone()
    )


def gather_whole(
    name: str,
    block: torch.Tensor,
    layout: Layout,
    comm: Communicator,
    ranks: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """The whole tensor from the ranks that hold its blocks; on all ranks, or on those given."""
    if block.ndim == 0 or 0 in layout.shape:
        return block.clone()
    owners = layout.owners()
    mine = owners[comm.rank]
    part = block if not mine.empty else block.new_empty(mine.shape)
    wanted = range(comm.size) if ranks is None else ranks
    transfer = Transfer(owners, Layout.on(layout.shape, layout.world, wanted))
    comm.prepare(transfer.groups)
    whole = carry(transfer, part, comm, About(name))
    return whole.clone() if whole is part else whole
