"""Checkpoints: written in parts by all ranks, read by any number of ranks under any plan."""

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.weight_files import export, load_weights

__all__ = ["Checkpoints", "export", "load_weights"]
