"""One strategy per operator: the single description that planner, simulator and runtime read."""

from shardwise.graph import Layer
from shardwise.strategies.base import LABEL_AXES, Gradients, Local, Need, Split, Stack, Strategy
from shardwise.strategies.conv import Conv, ConvTranspose, Linear
from shardwise.strategies.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from shardwise.strategies.pointwise import (
    Dropout,
    Expand,
    FeatureDropout,
    Input,
    Made,
    Opaque,
    Pointwise,
    PReLU,
)
from shardwise.strategies.pool import ADAPTIVE_AVG, ADAPTIVE_MAX, AdaptivePool, AvgPool, MaxPool
from shardwise.strategies.reduce import Reduce, WholeDim
from shardwise.strategies.resize import Interpolate
from shardwise.strategies.shape import Cat, EdgePad, Pad, Permute, PixelShuffle, Slice, View

STRATEGIES: dict[str, Strategy] = {
    "input": Input(),
    "conv": Conv(),
    "conv_transpose": ConvTranspose(),
    "linear": Linear(),
    "batch_norm": BatchNorm(),
    "instance_norm": InstanceNorm(),
    "group_norm": GroupNorm(),
    "layer_norm": LayerNorm(),
    "max_pool": MaxPool(),
    "avg_pool": AvgPool(),
    "adaptive_avg_pool": AdaptivePool(ADAPTIVE_AVG),
    "adaptive_max_pool": AdaptivePool(ADAPTIVE_MAX),
    "made": Made(),
    "pointwise": Pointwise(),
    "prelu": PReLU(),
    "dropout": Dropout(),
    "feature_dropout": FeatureDropout(),
    "expand": Expand(),
    "view": View(),
    "permute": Permute(),
    "cat": Cat(),
    "slice": Slice(),
    "pad": Pad(),
    "edge_pad": EdgePad(),
    "pixel_shuffle": PixelShuffle(),
    "reduce": Reduce(),
    "whole_dim": WholeDim(),
    "interpolate": Interpolate(),
    "opaque": Opaque(),
}


def strategy_of(layer: Layer) -> Strategy:
    """The strategy of a layer's operator."""
    return STRATEGIES[layer.op]


__all__ = [
    "LABEL_AXES",
    "STRATEGIES",
    "Gradients",
    "Local",
    "Need",
    "Split",
    "Stack",
    "Strategy",
    "strategy_of",
]
