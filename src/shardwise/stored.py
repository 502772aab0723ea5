"""The tensors a module stores: this rank's blocks of them, and the whole ones."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from shardwise.block import BlockParameter, Place, plain
from shardwise.box import Box
from shardwise.comm import About, Communicator
from shardwise.errors import ShardwiseError
from shardwise.exchange import carry
from shardwise.hooks import HOOKS, never_run
from shardwise.layout import Layout
from shardwise.transfer import Transfer

Tensors = dict[str, torch.Tensor]


def weightless(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of the same shape that takes no memory; a copy of a buffer (export writes it)."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.clone()
    if not tensor.is_contiguous():  # never touched, so that it is only an address
        return nn.Parameter(torch.empty_like(tensor.detach()), tensor.requires_grad)
    return nn.Parameter(tensor.detach().new_zeros(()).expand(tensor.shape), tensor.requires_grad)


def copy_structure(module: nn.Module) -> Any:
    """The same modules, with tables, lists and the like of their own; tensors are shared."""
    return _twin(module, {})


def _twin(value: Any, memo: dict[int, Any]) -> Any:
    """What stands for a value in the copy: modules, and what may hold some, are copied."""
    if id(value) in memo:
        return memo[id(value)]
    kind: Any = type(value)
    twin: Any
    if isinstance(value, nn.Module):
        twin = memo[id(value)] = kind.__new__(kind)
        twin.__dict__ = {name: _twin(own, memo) for name, own in value.__dict__.items()}
    elif kind is types.MethodType and isinstance(value.__self__, nn.Module):
        twin = types.MethodType(value.__func__, _twin(value.__self__, memo))
    elif kind in (dict, OrderedDict):
        twin = memo[id(value)] = kind()
        twin.update((key, _twin(own, memo)) for key, own in value.items())
    elif kind is list:
        twin = memo[id(value)] = []
        twin.extend(_twin(own, memo) for own in value)
    elif kind in (tuple, set):
        twin = kind(_twin(own, memo) for own in value)
    else:
        return value
    return twin


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


def split_tensors(root: nn.Module, layouts: dict[str, Layout], comm: Communicator) -> None:
    """Every tensor becomes this rank's block of rank 0's tensor; ties stay ties."""
    named = list(named_tensors(root))
    unique = {id(tensor): tensor for _, tensor in named}
    full = dict(zip(unique, from_root(list(unique.values()), comm), strict=True))
    blocks: dict[int, torch.Tensor] = {}
    first: dict[int, str] = {}  # names of tied tensors, by which layers know them
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        if known in layouts:
            layouts[name] = layouts[known]
        if id(tensor) not in blocks:
            block = block_of(full.pop(id(tensor)), layouts.get(name), comm.rank)
            if isinstance(tensor, nn.Parameter):
                block = _parameter(block, tensor.requires_grad, layouts.get(name), name, comm)
            blocks[id(tensor)] = block
        assign(root, name, blocks[id(tensor)])


def _parameter(
    block: torch.Tensor, requires_grad: bool, layout: Layout | None, name: str, comm: Communicator
) -> nn.Parameter:
    """A parameter, which knows of what it is a block where other ranks have others."""
    if layout is None or not is_split(block, layout):
        return nn.Parameter(block, requires_grad)
    return BlockParameter(block, requires_grad, Place(name, layout, comm))


def is_split(tensor: torch.Tensor, layout: Layout | None) -> bool:
    """Whether some rank holds less than the whole tensor."""
    return layout is not None and tensor.ndim > 0 and int(layout.numels.min()) < prod(layout.shape)


def guard_blocks(root: nn.Module, layouts: Mapping[str, Layout], rank: int) -> None:
    """Modules with split tensors load what is whole, and are not to be called by themselves."""
    for path, module in root.named_modules():
        own: dict[str, Layout] = {}
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            layout = layouts.get(f"{path}.{leaf}" if path else leaf)
            if tensor is not None and layout is not None and is_split(tensor, layout):
                own[leaf] = layout
        if own:
            load = partial(_load_blocks, {leaf: (la.shape, la[rank]) for leaf, la in own.items()})
            module.register_load_state_dict_pre_hook(load)
            if path:
                module.__dict__["forward"] = _refusal(path, min(own))


class Closed(dict[Any, Any]):
    """A table of a module that says why it cannot be changed."""

    def __init__(self, items: Mapping[Any, Any], why: str) -> None:
        super().__init__(items)
        self.why = why

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ShardwiseError(self.why)

    def __delitem__(self, key: Any) -> None:
        raise ShardwiseError(self.why)

    def __deepcopy__(self, memo: dict[int, Any]) -> Closed:
        return Closed(copy.deepcopy(dict(self), memo), self.why)


def close_tables(root: nn.Module) -> None:
    """Children, and hooks of children, cannot change: the model has been captured as it was."""
    for path, module in root.named_modules():
        where = f"module {path!r}" if path else "the model"
        why = f"{where} is parallel: change the modules of the original and make it parallel again"
        module._modules = Closed(module._modules, why)
        for hooks in HOOKS if path else ():
            setattr(module, hooks, Closed(getattr(module, hooks), never_run(path)))


def _refusal(path: str, leaf: str) -> Any:
    """The forward of a module that cannot be called by itself."""

    def forward(*args: Any, **kwargs: Any) -> None:
        raise ShardwiseError(
            f"module {path!r} of a parallel model cannot be called by itself: every rank holds "
            f"only a block of its {leaf}; call the whole model"
        )

    return forward


def _load_blocks(
    blocks: Mapping[str, tuple[tuple[int, ...], Box]],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Puts this rank's blocks in the place of whole tensors that are about to be loaded."""
    for leaf, (shape, box) in blocks.items():
        full = state_dict.get(prefix + leaf)
        if isinstance(full, torch.Tensor):
            if tuple(full.shape) != shape:
                del state_dict[prefix + leaf]
                errors.append(
                    f"size mismatch for {prefix + leaf}: copying a param with shape {full.shape} "
                    f"from checkpoint, the shape in current model is {torch.Size(shape)}."
                )
            else:
                state_dict[prefix + leaf] = full[box.slices_in(Box.whole(shape))].clone()


@contextmanager
def whole_tensors(
    root: nn.Module, layouts: Mapping[str, Layout], comm: Communicator
) -> Iterator[None]:
    """Within, every split tensor is whole."""
    blocks: Tensors = {}
    whole: dict[int, torch.Tensor] = {}
    try:
        for name, tensor in list(named_tensors(root)):
            if is_split(tensor, layouts.get(name)):
                blocks[name] = tensor
                if id(tensor) not in whole:
                    full = gather_whole(name, tensor, layouts[name], comm)
                    trained = isinstance(tensor, nn.Parameter)
                    whole[id(tensor)] = (
                        nn.Parameter(full, tensor.requires_grad) if trained else full
                    )
                assign(root, name, whole[id(tensor)])
        yield
    finally:
        for name, block in blocks.items():
            assign(root, name, block)


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
    block = plain(block)
    if not is_split(block, layout):
        return block.clone()
    owners = layout.owners()
    mine = owners[comm.rank]
    part = block if not mine.empty else block.new_empty(mine.shape)
    wanted = range(comm.size) if ranks is None else ranks
    transfer = Transfer(owners, Layout.on(layout.shape, layout.world, wanted))
    comm.prepare(transfer.groups)
    whole = carry(transfer, part, comm, About(name))
    return whole.clone() if whole is part else whole
