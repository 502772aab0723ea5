"""What the port of each host carries: all others at its switch send to it at once."""

from __future__ import annotations

import statistics

import torch

from shardwise.comm import Communicator
from shardwise.kernels.tuner import seconds

NUMEL = 1 << 19  # numbers of what reaches a port in all
RUNS = 3


def port_rates(comm: Communicator, switches: tuple[int, ...]) -> tuple[float, ...]:
    """Bytes a second that each rank gets from all others at its switch, which share the sending.

    A ring would show the slower of two ports. A rank that is alone at its switch gets them from
    everybody.
    """
    found = []
    for target, switch in enumerate(switches):
        near = [rank for rank, other in enumerate(switches) if other == switch and rank != target]
        senders = near or [rank for rank in range(comm.size) if rank != target]
        times = [_carried(comm, target, senders) for _ in range(RUNS + 1)]
        found.append(4.0 * NUMEL / statistics.median(times[1:]))
    return tuple(comm.gather_objects(found)[0])


def _carried(comm: Communicator, target: int, senders: list[int]) -> float:
    """Seconds until the target has all; the same on every rank."""
    part = torch.zeros(NUMEL // len(senders))
    sends = [(target, part)] if comm.rank in senders else []
    into = [(rank, part.clone()) for rank in senders] if comm.rank == target else []
    comm.gather_objects(None)
    own = seconds(lambda: comm.exchange(sends, into).wait())
    return comm.gather_objects(own)[target]
