"""What a matrix of messages takes on a network: the slow, obvious twin of tables and queues."""

from __future__ import annotations

import numpy as np

from shardwise.planner.links import Network


def message_seconds(network: Network, matrix: np.ndarray) -> float:
    """The time of messages that all start together; bytes from rank r to rank q."""
    if not matrix.any():
        return 0.0
    senders, receivers = np.nonzero(matrix)
    latencies, seconds = network.carried(senders, receivers, matrix[senders, receivers])
    messages = max(np.bincount(senders).max(), np.bincount(receivers).max())
    return seconds + float(latencies.max()) * float(messages)
