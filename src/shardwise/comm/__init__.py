"""Communication between ranks."""

from shardwise.comm.communicator import Communicator, Pending
from shardwise.comm.recording import Recording, Sent

__all__ = ["Communicator", "Pending", "Recording", "Sent"]
