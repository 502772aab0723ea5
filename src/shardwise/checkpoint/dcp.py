"""Folders of torch.distributed.checkpoint, which plain torch, DDP and FSDP2 read and write too.

They hold `{"model": ..., "optim": ...}` by the names of parameters, as torch's `get_state_dict`
gives it; so a folder goes from any number of ranks and any plan to any other, and to torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.optim import Optimizer

from shardwise.checkpoint.dcp_folder import DcpFolder, FolderEntry, open_dcp
from shardwise.checkpoint.dcp_writing import MODEL, OPTIMIZER, as_torch, check_new
from shardwise.checkpoint.held_tensors import held_tensors
from shardwise.checkpoint.manifest import Group, OptimizerState
from shardwise.checkpoint.optimizer_state import PREFIX, Optimizing, plain_settings
from shardwise.checkpoint.pieces import BoxOfTensor
from shardwise.checkpoint.together import torch_together
from shardwise.checkpoint.weight_files import as_weights, put, read_blocks
from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as
from shardwise.geometry.box import Box
from shardwise.runtime.agreement import agree_on, agree_to_start
from shardwise.runtime.parallel import ParallelModel, of


class _Planner(DefaultSavePlanner):
    """Torch's own, which finds our pieces too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.block if isinstance(found, BoxOfTensor) else super().lookup_object(index)


def save_dcp(folder: str | Path, model: ParallelModel, optimizer: Optimizer | None = None) -> None:
    """Writes a folder that torch.distributed.checkpoint reads; all ranks call it.

    Every rank writes its own blocks.

    >>> save_dcp("weights", model, optimizer)
    """
    handle, folder = of(model), Path(folder)
    handle.flush()
    handle.check_values()
    state, refusal = {}, None
    try:
        check_new(folder)
        state = _state(model, optimizer)
    except ShardwiseError as error:
        refusal = error
    comm = handle.comm
    agree_to_start(refusal, {}, comm)
    _add_values(state, comm)
    with torch_together(comm, f"writing {folder}"):
        torch_dcp.save(
            state,
            storage_writer=FileSystemWriter(folder),
            planner=_Planner(),
            process_group=comm.group_of_lane("checkpoint"),
            no_dist=comm.size == 1,
        )


def _state(model: ParallelModel, optimizer: Optimizer | None) -> dict[str, Any]:
    """This rank's pieces, in the places where torch looks for them."""
    held = held_tensors(model)
    weights: dict[str, Any] = {}
    for turn, tensor in enumerate(held):
        piece = tensor.copied(tensor.tensor, turn)
        if piece is not None:
            weights |= dict.fromkeys(tensor.names, piece)  # tied ones are written under each name
    state: dict[str, Any] = {MODEL: weights}
    if optimizer is not None:
        groups, pieces, values = Optimizing(optimizer, held).snapshot()
        kept: dict[str, dict[str, Any]] = {}
        for key, piece in pieces.items():
            name, _, own = key.removeprefix(f"{PREFIX}/").rpartition("/")
            kept.setdefault(name, {})[own] = piece
        state[OPTIMIZER] = {"state": kept, "values": values, "param_groups": as_torch(groups)}
    return state


def _add_values(state: dict[str, Any], comm: Communicator) -> None:
    """The first rank alone writes what is no tensor: numbers of all ranks, and the groups."""
    own = state.get(OPTIMIZER)
    told = comm.gather_objects(own.pop("values") if own else {})
    if own and comm.rank > 0:
        del own["param_groups"]
    elif own:
        for values in told:
            for name, numbers in values.items():
                own["state"].setdefault(name, {}).update(numbers)


@dataclass(frozen=True)
class _Contents:
    """What a folder holds of an optimizer, as `Optimizing` asks for it."""

    optimizer: OptimizerState
    tensors: Mapping[str, FolderEntry]


@dataclass(frozen=True)
class _Reader:
    document: _Contents

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        entry = self.document.tensors[key]
        assert entry.shape is not None
        return entry.read(Box.whole(entry.shape) if box is None else box)


def load_dcp(folder: str | Path, model: ParallelModel, optimizer: Optimizer | None = None) -> None:
    """Loads a folder that any torch wrote: alone, under DDP or FSDP2, or `save_dcp`.

    All ranks call it; each reads the chunks that hold any of its blocks. Nothing is changed on any
    rank where something is wrong with it.

    >>> load_dcp("weights", model, optimizer)
    """
    handle, folder = of(model), Path(folder)
    handle.flush()
    with handle.comm.doing("load_dcp"):
        opened, blocks, restoring, refusal = None, [], None, None
        try:
            with system_errors_as(f"{folder} cannot be read"):
                opened, held = open_dcp(folder), held_tensors(model)
                blocks = read_blocks(as_weights(opened), held, strict=True)
                if optimizer is not None:
                    optimizing = Optimizing(optimizer, held)
                    contents = _contents(opened, optimizing)
                    optimizing.check(contents, folder)
                    restoring = optimizing, contents, optimizing.read(_Reader(contents))
        except Exception as error:  # all ranks must hear of it before they wait for this one
            refusal = error
        agree_to_start(refusal, {}, handle.comm)
        assert opened is not None
        agree_on(opened.checksum, f"finds another checkpoint in {folder}", handle.comm)
    put(blocks)
    if restoring is not None:
        optimizing, contents, state = restoring
        optimizing.restore(contents, state)


def _contents(folder: DcpFolder, optimizing: Optimizing) -> _Contents:
    """The state of an optimizer; parameters by name, or by number as `optimizer.state_dict()`."""
    found = folder.below(OPTIMIZER, "optimizer")
    if not any(path[0] == "param_groups" for path in found):
        raise ShardwiseError(
            f"{folder.place} holds no state of an optimizer under {OPTIMIZER!r}, as torch's "
            "get_state_dict gives it"
        )
    names = {str(n): param.names[0] for n, param in enumerate(optimizing.params)}
    names |= {name: param.names[0] for param in optimizing.params for name in param.names}

    def name_of(key: Any) -> str:
        return names.get(str(key), str(key))

    tensors: dict[str, FolderEntry] = {}
    values: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for path, entry in found.items():
        if path[0] == "state" and len(path) == 3 and entry.shape is not None:
            tensors[f"{PREFIX}/{name_of(path[1])}/{path[2]}"] = entry
        elif path[0] == "state" and len(path) == 3:
            values.setdefault(name_of(path[1]), {})[path[2]] = entry.value()
        elif path[0] == "param_groups" and len(path) == 3:
            groups.setdefault(int(path[1]), {})[path[2]] = entry.value()
        else:
            raise ShardwiseError(f"{folder.place}: {'.'.join(map(str, path))!r} is nothing known")
    made = [_group(groups[n], name_of) for n in sorted(groups)]
    return _Contents(OptimizerState(kind=optimizing.kind, groups=made, values=values), tensors)


def _group(group: dict[str, Any], name_of: Any) -> Group:
    params = [name_of(key) for key in group.get("params", ())]
    return Group(params=params, settings=plain_settings(group))
