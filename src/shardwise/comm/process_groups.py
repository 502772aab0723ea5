"""Process groups that some ranks make by themselves, while the others do something else.

`torch.distributed.new_group` is for all ranks of the world. With `use_local_synchronization` it is
for the members only, but it names a group by how many groups a process has: members that belong to
other numbers of groups wait for each other under different names, in torch 2.13 at least. Here they
give it a name that they have agreed on.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.comm.wires import Members
from shardwise.errors import ShardwiseError


def make_group(members: Members, backend: str, timeout: float, name: str) -> Any:
    """The group of these, in this order; each of them calls it, with a name that is new."""
    torch_groups: Any = dist.distributed_c10d
    made, _ = torch_groups._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        list(members),
        dist.Backend(backend),
        torch_groups._get_default_store(),
        f"shardwise-{name}",
        timeout=timedelta(seconds=timeout),
    )
    numbers = {member: number for number, member in enumerate(members)}
    torch_groups._world.pg_group_ranks[made] = numbers
    return made


def check_group(group: Any) -> None:
    """Raises where this process is no member of a group, or where that is no group at all."""
    if isinstance(group, int):  # torch's GroupMember.NON_GROUP_MEMBER
        raise not_a_member()
    if not isinstance(group, dist.ProcessGroup):
        raise ShardwiseError(
            f"group={group!r} must be a process group, as torch.distributed.new_group makes it"
        )
    try:
        members = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        raise ended() from None
    if dist.get_rank() not in members:
        raise not_a_member()
    if len(members) < dist.get_world_size() and _splits(group):
        raise ShardwiseError(
            "a part of the ranks cannot make groups of NCCL where init_process_group was given a "
            "device_id: all ranks would have to take part; leave device_id out"
        )


def ended() -> ShardwiseError:
    return ShardwiseError(
        "the process group has been destroyed, or its world has ended; make it again, with "
        "torch.distributed.new_group"
    )


def not_a_member() -> ShardwiseError:
    return ShardwiseError(
        f"rank {dist.get_rank()} is not in the group; make the module parallel on the ranks of the "
        "group only, and leave it alone on the others"
    )


def _splits(group: Any) -> bool:
    """Whether torch makes groups like this one out of the communicator of all ranks."""
    bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return bound and "nccl" in str(dist.get_backend_config(group))
