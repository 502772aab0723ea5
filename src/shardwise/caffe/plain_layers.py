"""Layers without weights, each as a function of its bottoms."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .messages import ProtoMessage
from .weighted_layers import Shapes, per_dim

Function = Callable[..., Any]


def pooling(layer: ProtoMessage, shapes: Shapes) -> Function:
    """Caffe's windows begin within the input or its first padding, as in torch's ceil mode."""
    param, space = layer.pooling_param, shapes[0][2:]
    if param.pool == "STOCHASTIC" or len(space) != 2:
        raise layer.wrong(f"layer {layer.name!r}: pooling must be MAX or AVE, in two dimensions")
    function = functional.max_pool2d if param.pool == "MAX" else functional.avg_pool2d
    if param.global_pooling:
        if param.pool == "AVE":
            return lambda x: functional.adaptive_avg_pool2d(x, 1)
        return lambda x: functional.adaptive_max_pool2d(x, 1)
    sizes = {"kernel_size": 0, "stride": 1, "pad": 0}
    kernel, stride, pad = (per_dim(param, name, 2, default) for name, default in sizes.items())
    if not all(kernel) or any(s > k for s, k in zip(stride, kernel, strict=True)):
        raise layer.wrong(f"layer {layer.name!r} needs a kernel_size of at least its stride")
    ceil = param.round_mode == "CEIL"
    return lambda x: function(x, kernel, stride, pad, ceil_mode=ceil)


def lrn(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.lrn_param
    size, alpha, beta, k = param.local_size, param.alpha, param.beta, param.k
    if not size % 2:
        raise layer.wrong(f"layer {layer.name!r}: local_size {size} must be odd")
    if param.norm_region == "ACROSS_CHANNELS":
        return lambda x: functional.local_response_norm(x, size, alpha, beta, k)
    half = (size - 1) // 2
    return lambda x: x * (1 + alpha * functional.avg_pool2d(x * x, size, 1, half)) ** -beta


def concat(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.concat_param
    axis = param.axis if not param.has("concat_dim") else param.concat_dim
    return lambda *x: torch.cat(x, axis)


def slices(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.slice_param
    axis = param.axis if not param.has("slice_dim") else param.slice_dim
    size, parts = shapes[0][axis], len(layer.top)
    points = list(param.slice_point) or [size // parts * index for index in range(1, parts)]
    bounds = [0, *points, size]
    if len(points) != parts - 1 or sorted(set(bounds)) != bounds:
        raise layer.wrong(f"layer {layer.name!r} must cut {size} into {parts} parts")
    lengths = [end - begin for begin, end in pairwise(bounds)]
    return lambda x: torch.split(x, lengths, axis)


def eltwise(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.eltwise_param
    factors = list(param.coeff) or [1.0] * len(shapes)
    if len(factors) != len(shapes):
        raise layer.wrong(f"layer {layer.name!r} needs a coeff per bottom")

    def combined(*x: Tensor) -> Tensor:
        total = x[0] if factors[0] == 1 or param.operation != "SUM" else factors[0] * x[0]
        for factor, other in zip(factors[1:], x[1:], strict=True):
            if param.operation == "SUM":
                total = total + (other if factor == 1 else factor * other)
            else:
                total = total * other if param.operation == "PROD" else torch.maximum(total, other)
        return total

    return combined


def reshape(layer: ProtoMessage, shapes: Shapes) -> Function:
    param, rank = layer.reshape_param, len(shapes[0])
    begin = param.axis if param.axis >= 0 else param.axis + rank + 1
    end = rank if param.num_axes == -1 else begin + param.num_axes
    dims = list(param.shape.dim)

    def reshaped(x: Tensor) -> Tensor:
        new = [x.shape[begin + i] if dim == 0 else dim for i, dim in enumerate(dims)]
        return x.reshape(*x.shape[:begin], *new, *x.shape[end:])

    return reshaped


def crop(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.crop_param
    axis = param.axis % len(shapes[0])
    dims = list(range(axis, len(shapes[0])))
    offsets = list(param.offset or [0]) * (1 if len(param.offset) > 1 else len(dims))
    sizes = [shapes[1][dim] for dim in dims]
    if len(offsets) != len(dims):
        raise layer.wrong(f"layer {layer.name!r} needs 1 or {len(dims)} offsets")

    def cropped(x: Tensor, like: Tensor) -> Tensor:
        for dim, offset, size in zip(dims, offsets, sizes, strict=True):
            x = x.narrow(dim, offset, size)
        return x

    return cropped


def power(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.power_param
    factor, shift, exponent = param.scale, param.shift, param.power

    def raised(x: Tensor) -> Tensor:
        x = x if factor == 1 else x * factor
        x = x if shift == 0 else x + shift
        return x if exponent == 1 else x**exponent

    return raised


def exponential(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.exp_param
    base = 1.0 if param.base == -1 else log(param.base)
    return lambda x: torch.exp(base * (param.shift + param.scale * x))


def logarithm(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.log_param
    base = 1.0 if param.base == -1 else log(param.base)
    return lambda x: torch.log(param.shift + param.scale * x) / base


def relu(layer: ProtoMessage, shapes: Shapes) -> Function:
    slope = layer.relu_param.negative_slope
    return (lambda x: functional.leaky_relu(x, slope)) if slope else functional.relu


def elu(layer: ProtoMessage, shapes: Shapes) -> Function:
    return lambda x: functional.elu(x, layer.elu_param.alpha)


def softmax(layer: ProtoMessage, shapes: Shapes) -> Function:
    return lambda x: torch.softmax(x, layer.softmax_param.axis)


def flatten(layer: ProtoMessage, shapes: Shapes) -> Function:
    param = layer.flatten_param
    return lambda x: x.flatten(param.axis, param.end_axis)


def split(layer: ProtoMessage, shapes: Shapes) -> Function:
    return lambda x: (x,) * len(layer.top)


PLAIN: dict[str, Callable[[ProtoMessage, Shapes], Function]] = {
    "AbsVal": lambda layer, shapes: torch.abs,
    "BNLL": lambda layer, shapes: functional.softplus,
    "Concat": concat,
    "Crop": crop,
    "ELU": elu,
    "Eltwise": eltwise,
    "Exp": exponential,
    "Flatten": flatten,
    "LRN": lrn,
    "Log": logarithm,
    "Pooling": pooling,
    "Power": power,
    "ReLU": relu,
    "Reshape": reshape,
    "Sigmoid": lambda layer, shapes: torch.sigmoid,
    "Slice": slices,
    "Softmax": softmax,
    "Split": split,
    "TanH": lambda layer, shapes: torch.tanh,
}
