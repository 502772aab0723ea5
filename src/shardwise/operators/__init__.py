"""One strategy per operator: the single description that planner, simulator and runtime read."""

from shardwise.graph.layer_graph import Layer
from shardwise.operators.conv import Conv, ConvTranspose, Linear
from shardwise.operators.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from shardwise.operators.pointwise import (
    Dropout,
    Expand,
    FeatureDropout,
    Input,
    Made,
    Opaque,
    Pointwise,
    PReLU,
)
from shardwise.operators.pool import ADAPTIVE_AVG, ADAPTIVE_MAX, AdaptivePool, AvgPool, MaxPool
from shardwise.operators.reduce import Reduce, WholeDim
from shardwise.operators.resize import Interpolate
from shardwise.operators.shape import Cat, EdgePad, Pad, Permute, PixelShuffle, Slice, View
from shardwise.operators.strategy import LABEL_AXES, Gradients, Local, Need, Split, Stack, Strategy

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
