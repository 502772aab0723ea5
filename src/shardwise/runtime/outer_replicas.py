"""What torch has wrapped around a parallel model: DDP or FSDP2, over other ranks than its own.

They read a gradient in the backward pass, when autograd is done with it, and average it over the
replicas. So all of it must be there by then: what is put off is not averaged, or is added later
to an average of parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

FSDP_MARK = "_is_fsdp_managed_module"  # which fully_shard leaves on every module inside


def averages_gradients(modules: Iterable[Any]) -> bool:
    """Whether the forward pass that goes on is one whose gradients DDP or FSDP2 will average."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and ddp.require_backward_grad_sync:
        return True
    return any(getattr(module, FSDP_MARK, False) for module in modules)
