"""From a model's whole tensors to this rank's blocks of rank 0's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.model.weightless import device_of
from shardwise.modules import assign, named_tensors
from shardwise.runtime.block import BlockParameter
from shardwise.runtime.place import Place
from shardwise.runtime.uninitialized import blank_like, home_of
from shardwise.runtime.weights import Tensors, is_split

PACKET = 64 << 20  # bytes of whole tensors that are sent at once


def split_tensors(
    root: nn.Module, layouts: dict[str, Layout], comm: Communicator, valued: Collection[str]
) -> Tensors:
    """Every tensor becomes this rank's block of rank 0's tensor; ties stay ties.

    Those without values there, which are not among `valued`, become blocks without; they are
    returned.
    """
    named = list(named_tensors(root))
    first = first_names(named)
    for name, tensor in named:
        if first[id(tensor)] in layouts:  # by which layers know tied tensors
            layouts[name] = layouts[first[id(tensor)]]
    whole = {first[id(tensor)]: tensor for _, tensor in named}
    blocks: Tensors = {}
    for name, block in from_root({n: t for n, t in whole.items() if n in valued}, layouts, comm):
        blocks[name] = _stored(block, whole[name], layouts.get(name), name, comm)
    blank: Tensors = {}
    for name, tensor in whole.items():
        if name not in blocks:
            block = blank_like(cut(tensor.detach(), layouts.get(name), comm.rank), home_of(comm))
            blank[name] = blocks[name] = _stored(block, tensor, layouts.get(name), name, comm)
    for name, tensor in named:
        assign(root, name, blocks[first[id(tensor)]])
    return blank


def first_names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """The first name of every tensor, by its id: tied ones have several."""
    first: dict[int, str] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), name)
    return first


def _stored(
    block: torch.Tensor, tensor: torch.Tensor, layout: Layout | None, name: str, comm: Communicator
) -> torch.Tensor:
    """A block as the model holds it: a parameter where the whole tensor is one."""
    if not isinstance(tensor, nn.Parameter):
        return block
    return _parameter(block, tensor.requires_grad, layout, name, comm)


def _parameter(
    block: torch.Tensor, requires_grad: bool, layout: Layout | None, name: str, comm: Communicator
) -> nn.Parameter:
    """A parameter, which knows of what it is a block where other ranks have others."""
    if layout is None or not is_split(block, layout):
        return nn.Parameter(block, requires_grad)
    return BlockParameter(block, requires_grad, Place(name, layout, comm))


def from_root(
    whole: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], comm: Communicator
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's blocks of rank 0's tensors, sent packed: small messages waste bandwidth (P5).

    No more than one packet is whole at a time. Other ranks' tensors need not have values.
    """
    kinds = {name: (t.dtype, device_of(t, home_of(comm))) for name, t in whole.items()}
    for kind in sorted(set(kinds.values()), key=str):
        alike, device = [name for name in whole if kinds[name] == kind], kind[1]
        for bucket in _buckets({n: whole[n] for n in alike}, num_bytes=PACKET):
            yield from _cut_all({n: whole[n].detach() for n in bucket}, device, layouts, comm)


def _cut_all(
    whole: Tensors, device: torch.device, layouts: Mapping[str, Layout], comm: Communicator
) -> Iterator[tuple[str, torch.Tensor]]:
    packed = _from_root(list(whole.values()), device, comm)
    for (name, tensor), full in zip(whole.items(), packed, strict=True):
        layout = layouts.get(name)
        like = cut(tensor, layout, comm.rank)  # in how it lies in memory
        yield name, torch.empty_like(like, device=device).copy_(cut(full, layout, comm.rank))


def _from_root(
    tensors: Sequence[torch.Tensor], device: torch.device, comm: Communicator
) -> Sequence[torch.Tensor]:
    """Rank 0's tensors of one type."""
    if comm.size == 1:
        return tensors
    if comm.rank == 0:
        packed = torch.cat([t.reshape(-1) for t in tensors])
    else:
        size = sum(t.numel() for t in tensors)
        packed = torch.empty(size, dtype=tensors[0].dtype, device=device)
    comm.broadcast(packed).wait()
    parts = packed.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _buckets(tensors: Mapping[str, torch.Tensor], num_bytes: int) -> Iterator[list[str]]:
    """Names of consecutive tensors of together about this many bytes."""
    bucket: list[str] = []
    for name in tensors:
        bucket.append(name)
        if sum(tensors[n].numel() * tensors[n].element_size() for n in bucket) >= num_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def cut(whole: torch.Tensor, layout: Layout | None, rank: int) -> torch.Tensor:
    """This rank's block of a whole tensor, in the same memory; without a layout, all of it."""
    if layout is None or whole.ndim == 0 or not whole.numel():
        return whole
    return whole[layout[rank].slices_in(Box.whole(tuple(whole.shape)))]
