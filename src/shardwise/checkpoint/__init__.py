"""Checkpoints: written in parts by all ranks, read by any number of ranks under any plan."""

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.dcp import load_dcp, save_dcp
from shardwise.checkpoint.weight_files import export, load_weights

__all__ = ["Checkpoints", "export", "load_dcp", "load_weights", "save_dcp"]
