"""The ranks that a user names: all, those of a process group, or those of a mesh of devices."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardwise.comm.communicator import Communicator
from shardwise.comm.process_groups import not_a_member
from shardwise.errors import ShardwiseError

WORLD = "world"  # all ranks


def communicator_of(
    comm: Communicator | None, group: Any, mesh: Any, num_workers: int
) -> Communicator:
    """How so many workers talk to each other, which at most one of the three names.

    Torch has other words for the group of a rank that is not in it: a number, or None.
    """
    named = {"comm": comm is not None, "group": group != WORLD, "mesh": mesh is not None}
    given = [name for name, is_given in named.items() if is_given]
    if len(given) > 1:
        raise ShardwiseError(f"{' and '.join(given)} are both given; give the one that is meant")
    if comm is not None:
        return comm
    if mesh is not None:
        return Communicator(_group_of(mesh))
    if group is None:  # which is also torch's word for all ranks
        _check_all(num_workers)
    return Communicator(None if group == WORLD else group)


def _check_all(num_workers: int) -> None:
    if dist.is_available() and dist.is_initialized() and num_workers < dist.get_world_size():
        raise not_a_member()


def _group_of(mesh: Any) -> Any:
    if not hasattr(mesh, "get_group"):
        raise ShardwiseError(f"mesh={mesh!r} must be a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        one = f"mesh[{names[-1]!r}], say" if names else "name them, and give mesh[name]"
        raise ShardwiseError(
            f"a mesh of {mesh.ndim} dimensions has several groups of ranks; give that of one: {one}"
        )
    if mesh.get_coordinate() is None:
        raise not_a_member()
    return mesh.get_group()
