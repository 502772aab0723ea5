"""Checkpoints: written in parts by all ranks, read by any number of ranks under any plan."""

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.export import export
from shardwise.checkpoint.loading import load_weights

__all__ = ["Checkpoints", "export", "load_weights"]
