"""Messages on the links of a cluster, one after the other: when each of them arrives."""

from __future__ import annotations

import numpy as np

from shardwise.planner.links import Level, Network


class PortQueues:
    """The ports of all levels, each of which serves one transfer after the other."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.free = [np.zeros((2, len(level.starts))) for level in network.levels]  # out, in

    def carry(
        self, matrix: np.ndarray, start: np.ndarray, own: np.ndarray | None = None
    ) -> np.ndarray:
        """When each rank has all messages of a transfer, bytes from rank r to rank q.

        On a staged link, what a rank keeps (`own`) crosses it too.
        """
        if not matrix.any():
            return start.copy()
        staged = self.network.levels[0].link.staged
        if staged and own is not None:
            matrix = matrix + np.diag(own)
        senders, receivers = np.nonzero(matrix)
        sizes = matrix[senders, receivers]
        done = start[senders].copy()
        latency = 0.0
        for level, free in zip(self.network.levels, self.free, strict=True):
            crossing = level.units[senders] != level.units[receivers]
            if level.link.staged:
                crossing |= senders == receivers
            if crossing.any():
                latency = level.link.latency
                ends = [
                    _serve(
                        level,
                        free[way],
                        level.units[side[crossing]],
                        sizes[crossing],
                        start[senders[crossing]],
                    )
                    for way, side in enumerate((senders, receivers))
                ]
                done[crossing] = np.maximum(done[crossing], np.maximum(*ends))
        messages = max(np.bincount(senders).max(), np.bincount(receivers).max())
        arrival = start.copy()
        np.maximum.at(arrival, receivers, done + latency * float(messages))
        return arrival


def _serve(
    level: Level, free: np.ndarray, units: np.ndarray, sizes: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """When the port of each message's unit has served it and all others of this transfer."""
    count = len(level.starts)
    amounts = np.bincount(units, sizes, minlength=count)
    begin = np.full(count, -np.inf)
    np.maximum.at(begin, units, start)
    if level.link.shared:
        group = level.groups[level.starts]
        total, first = np.zeros(group.max() + 1), np.full(group.max() + 1, -np.inf)
        np.add.at(total, group, amounts)
        np.maximum.at(first, group, np.maximum(begin, free))
        ends = first[group] + total[group] / level.link.rate
    else:
        ends = np.maximum(begin, free) + amounts / level.link.rate
    used = amounts > 0
    free[used] = ends[used]
    return ends[units]
