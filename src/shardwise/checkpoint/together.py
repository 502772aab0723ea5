"""What torch.distributed.checkpoint does on all ranks at once, and how it fails on all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from shardwise.comm import About, Communicator
from shardwise.comm.pending import Communication
from shardwise.errors import ShardwiseError, one_line

# One worker without a process group is nothing to warn about.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


@contextmanager
def torch_together(comm: Communicator, what: str) -> Iterator[None]:
    """Within, torch brings all ranks together; what one finds wrong is raised on all."""
    talk = Communication(comm, "exchange", range(comm.size), About(what))
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise ShardwiseError(sentence(cause, what, comm.global_rank(rank))) from None
    except RuntimeError as error:
        raise talk.failed(error, talk.peers) from None


def sentence(error: BaseException, what: str, rank: int) -> str:
    """What went wrong on a rank, in one line."""
    if isinstance(error, ShardwiseError):
        return str(error)
    return f"{what} failed on rank {rank}: {one_line(error)}"
