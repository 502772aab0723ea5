"""Checkpoints: written in parts by all ranks, read by any number of ranks under any plan."""

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.export import export

__all__ = ["Checkpoints", "export"]
