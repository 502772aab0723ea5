"""Communication between ranks."""

from shardwise.comm.communicator import Communicator, SumRules
from shardwise.comm.pending import AGREEMENT, ANYTHING, About, Pending
from shardwise.comm.timeline import Event, Timeline

__all__ = [
    "AGREEMENT",
    "ANYTHING",
    "About",
    "Communicator",
    "Event",
    "Pending",
    "SumRules",
    "Timeline",
]
