"""Layers with weights: convolutions, products, norms, scales."""

from __future__ import annotations

from math import log, prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from .fillers import fill
from .messages import ProtoMessage

Shapes = list[tuple[int, ...]]


def per_dim(param: ProtoMessage, name: str, num_dims: int, default: int) -> tuple[int, ...]:
    """A size per dim of space: one for all, one for each, or as name_h and name_w."""
    sides = [f"{name.removesuffix('_size')}_{side}" for side in "hw"]
    if name != "dilation" and num_dims == 2 and any(map(param.has, sides)):
        return tuple(
            getattr(param, side) or (default if name != "kernel_size" else 0) for side in sides
        )
    given = getattr(param, name)
    given = [given] if isinstance(given, int) else list(given or [])
    if len(given) not in (0, 1, num_dims):
        raise param.wrong(f"{name} must have 1 or {num_dims} numbers, not {len(given)}", name)
    return tuple(given or [default]) * (num_dims // max(len(given), 1))


class FilledWeights(nn.Module):
    """Weights are made on the meta device, for shapes only, and then filled as the layer says."""

    fillers: tuple[tuple[str, ProtoMessage, float], ...] = ()

    def fill(self) -> None:
        for name, filler, default in self.fillers:
            weight = getattr(self, name)
            if weight is not None:
                fill(weight, filler, default)


class Convolve(FilledWeights):
    """A convolution, or the transposed one."""

    def __init__(self, layer: ProtoMessage, shapes: Shapes, transposed: bool) -> None:
        super().__init__()
        param, (_, channels, *space) = layer.convolution_param, shapes[0]
        dims, outputs, group = len(space), param.num_output, param.group
        kernel = per_dim(param, "kernel_size", dims, 0)
        if not outputs or not all(kernel) or param.axis != 1 or dims not in (1, 2, 3):
            raise layer.wrong(f"layer {layer.name!r} needs num_output, kernel_size and axis 1")
        if channels % group or outputs % group:
            raise layer.wrong(
                f"layer {layer.name!r}: group {group} must divide {channels} channels and "
                f"{outputs} outputs"
            )
        pair = (channels, outputs // group) if transposed else (outputs, channels // group)
        self.weight = nn.Parameter(torch.empty(*pair, *kernel))
        self.bias = nn.Parameter(torch.empty(outputs)) if param.bias_term else None
        names = {"stride": 1, "padding": 0, "dilation": 1}
        self.how = {
            n: per_dim(param, n.replace("padding", "pad"), dims, d) for n, d in names.items()
        }
        self.how["groups"] = group
        family = "conv_transpose" if transposed else "conv"
        self.function = getattr(functional, f"{family}{dims}d")
        self.fillers = (("weight", param.weight_filler, 0.0), ("bias", param.bias_filler, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias, **self.how)


class InnerProduct(FilledWeights):
    def __init__(self, layer: ProtoMessage, shapes: Shapes) -> None:
        super().__init__()
        param = layer.inner_product_param
        self.axis, self.transposed = param.axis % len(shapes[0]), param.transpose
        if not param.num_output or not self.axis:
            raise layer.wrong(f"layer {layer.name!r} needs num_output, and an axis above 0")
        sizes = (param.num_output, prod(shapes[0][self.axis :]))
        self.weight = nn.Parameter(torch.empty(sizes[::-1] if param.transpose else sizes))
        self.bias = nn.Parameter(torch.empty(sizes[0])) if param.bias_term else None
        self.fillers = (("weight", param.weight_filler, 0.0), ("bias", param.bias_filler, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        return functional.linear(x.flatten(self.axis), weight, self.bias)


class Scale(FilledWeights):
    """A factor, a summand, or both, along some dims; given, or of its own."""

    def __init__(self, layer: ProtoMessage, shapes: Shapes) -> None:
        super().__init__()
        scales = layer.type == "Scale"
        param = layer.scale_param if scales else layer.bias_param
        axis = param.axis % len(shapes[0])
        end = len(shapes[0]) if param.num_axes == -1 else axis + param.num_axes
        own = shapes[1] if len(shapes) > 1 else shapes[0][axis:end]
        self.scales, self.given = scales, len(shapes) > 1
        self.view = (*own, *[1] * (len(shapes[0]) - axis - len(own)))
        factor, summand = scales and not self.given, not scales and not self.given
        summand = summand or (scales and param.bias_term)
        self.weight = nn.Parameter(torch.empty(own)) if factor else None
        self.bias = nn.Parameter(torch.empty(own)) if summand else None
        bias = param.bias_filler if scales else param.filler
        self.fillers = (("weight", param.filler, 1.0), ("bias", bias, 0.0))

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        factor, summand = (given, self.bias) if self.scales else (None, given)
        factor = self.weight if factor is None else factor
        summand = self.bias if summand is None else summand
        x = x if factor is None else x * factor.view(self._shape(factor))
        return x if summand is None else x + summand.view(self._shape(summand))

    def _shape(self, values: Tensor) -> tuple[int, ...]:
        return (*values.shape, *self.view[values.ndim :])


class PRelu(FilledWeights):
    def __init__(self, layer: ProtoMessage, shapes: Shapes) -> None:
        super().__init__()
        param = layer.prelu_param
        self.weight = nn.Parameter(torch.empty(1 if param.channel_shared else shapes[0][1]))
        self.fillers = (("weight", param.filler, 0.25),)

    def forward(self, x: Tensor) -> Tensor:
        return functional.prelu(x, self.weight)


class CaffeBatchNorm(nn.BatchNorm2d):
    """Statistics without weights; running ones are sums divided by a factor that grows.

    That factor, Caffe's third blob, is (1 - f^t) / (1 - f) after t batches with the fraction f, so
    that batch t has the weight of its inverse: t is kept, and the factor follows.
    """

    num_batches_tracked: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, layer: ProtoMessage, shapes: Shapes) -> None:
        param = layer.batch_norm_param
        self.fraction = param.moving_average_fraction
        super().__init__(shapes[0][1], eps=param.eps, affine=False)
        self.use_global = param.use_global_stats

    @property
    def momentum(self) -> float:  # type: ignore[override]
        """The weight of a batch that has been counted already."""
        if torch.compiler.is_compiling() or self.num_batches_tracked.is_meta:
            return 1 - self.fraction
        return 1 / max(self.factor(), 1.0)

    @momentum.setter
    def momentum(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: float
    ) -> None:
        pass

    def factor(self) -> float:
        batches = int(self.num_batches_tracked)
        return batches if self.fraction == 1 else (1 - self.fraction**batches) / (1 - self.fraction)

    def forward(self, input: Tensor) -> Tensor:
        by_batch = self.training if self.use_global is None else not self.use_global
        if by_batch and not self.training:
            return functional.batch_norm(input, None, None, None, None, True, 0.0, self.eps)
        if by_batch:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum if by_batch else 0.0
        running = (self.running_mean, self.running_var)
        return functional.batch_norm(input, *running, None, None, by_batch, momentum, self.eps)

    def load_sums(self, mean: Tensor, variance: Tensor, factor: float) -> None:
        """Takes over Caffe's sums and their factor."""
        assert self.running_mean is not None and self.running_var is not None
        self.running_mean.copy_(mean / factor if factor else mean * 0)
        self.running_var.copy_(variance / factor if factor else variance * 0)
        rest = 1 - factor * (1 - self.fraction)  # 0 where the factor no longer grows
        many = log(1e-6) / log(self.fraction) if self.fraction < 1 else factor
        batches = log(rest) / log(self.fraction) if self.fraction < 1 and rest > 1e-6 else many
        self.num_batches_tracked.fill_(round(batches))

    def fill(self) -> None:
        self.reset_running_stats()
