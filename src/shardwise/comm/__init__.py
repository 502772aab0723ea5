"""Communication between ranks."""

from shardwise.comm.communicator import ANYTHING, About, Communicator, Pending, SumRules
from shardwise.comm.recording import Recording, Sent
from shardwise.comm.timeline import Event, Timeline

__all__ = [
    "ANYTHING",
    "About",
    "Communicator",
    "Event",
    "Pending",
    "Recording",
    "Sent",
    "SumRules",
    "Timeline",
]
