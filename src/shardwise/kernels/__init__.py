"""Convolutions on a CPU: native kernels, chosen for each layer and direction, and stock ones."""

from shardwise.kernels.native import library
from shardwise.kernels.ops import conv
from shardwise.kernels.shape import ConvShape

__all__ = ["ConvShape", "conv", "library"]
