"""Communication between ranks."""

from shardwise.comm.communicator import ANYTHING, About, Communicator, LostPeer, Pending, Sums
from shardwise.comm.recording import Recording, Sent
from shardwise.comm.timeline import Event, Timeline

__all__ = [
    "ANYTHING",
    "About",
    "Communicator",
    "Event",
    "LostPeer",
    "Pending",
    "Recording",
    "Sent",
    "Sums",
    "Timeline",
]
