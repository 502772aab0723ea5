"""Convolutions on a CPU: native kernels, chosen for each layer and direction, and stock ones."""

from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.native import library
from shardwise.kernels.ops import conv

__all__ = ["ConvShape", "conv", "library"]
