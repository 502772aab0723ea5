"""Proof that a plan computes what one device computes: outputs, gradients, statistics, weights."""

from shardwise.verify.comparison import TOLERANCE, TOLERANCES, Comparison
from shardwise.verify.proof import compare

__all__ = ["TOLERANCE", "TOLERANCES", "Comparison", "compare"]
