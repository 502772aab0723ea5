"""The tensors a module stores: this rank's blocks of them, and the whole ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from shardwise.comm import About, Communicator
from shardwise.comm.exchange import carry
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Transfer
from shardwise.model.hooks import HOOKS, never_run
from shardwise.modules import assign, named_tensors
from shardwise.runtime.block import BlockParameter, plain

Tensors = dict[str, torch.Tensor]


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
                block = full.detach()[box.slices_in(Box.whole(shape))].clone()
                param = module._parameters.get(leaf)
                if isinstance(param, BlockParameter):  # and stays one with assign=True
                    block = BlockParameter(block, param.requires_grad, param._place)
                state_dict[prefix + leaf] = block


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
