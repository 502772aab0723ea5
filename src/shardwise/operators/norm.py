"""Norms with the statistics of the global tensor, whatever the split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.errors import ShardwiseError
from shardwise.geometry.layout import Layout
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request
from shardwise.operators.norm_over_ranks import (
    Grouping,
    Normalize,
    NormalizeChannels,
    NormalizeSize,
    precise,
)
from shardwise.operators.reduce import DimAttrs
from shardwise.operators.splits import Split, rows
from shardwise.operators.strategy import (
    Inputs,
    Local,
    Need,
    Strategy,
    broadcast,
    is_active,
    operator,
)
from shardwise.tensors import memory_format_of

Grouped = tuple[Grouping, int]
Params = tuple[Tensor | None, Tensor | None]  # weight and bias


def _with_dense_gradient(y: Tensor, x: Tensor) -> Tensor:
    """A stock batch norm of one sample, whose backward pass gets a gradient that lies like x.

    Of one that lies otherwise, transposed say, torch's CPU kernel makes wrong ones (torch 2.13).
    """
    if y.requires_grad and x.shape[0] == 1:
        memory_format = memory_format_of(x)
        y.register_hook(lambda gradient: gradient.contiguous(memory_format=memory_format))
    return y


@dataclass(frozen=True)
class NormAttrs:
    eps: float


@dataclass(frozen=True)
class BatchNormAttrs(NormAttrs):
    momentum: float


@dataclass(frozen=True)
class GroupNormAttrs(NormAttrs):
    groups: int


@dataclass(frozen=True)
class LayerNormAttrs(NormAttrs):
    num_dims: int


class Norm(Strategy):
    """What the four norms share. Subclasses say what is summed and where parameters lie."""

    keeps_inputs, draws = True, False
    normalizes = True

    def parameter(self, split: Split, shape: tuple[int, ...]) -> Layout:
        """Where the blocks of weight and bias lie."""
        return Layout.of(shape, [split.dim_ranges(1)])

    def num_sums(self, layer: Layer) -> int:
        return 2 if layer.dtype is torch.float64 else 1

    def needs(self, split: Split) -> tuple[Need, ...]:
        params = split.layer.operands[1:]
        return Need(self.output(split)), *(Need(self.parameter(split, p.shape)) for p in params)

    def run(self, local: Local[Any], tensors: list[Tensor]) -> Tensor:
        x, weight, bias = local.tensors(tensors)
        assert x is not None
        if local.sums is None:
            return self.stock(local, x, (weight, bias))
        if weight is not None:
            shape = self.weight_view(x, weight)
            weight = weight.view(shape)
            bias = bias.view(shape) if bias is not None else None
        args = (*self.grouping(local, x, local.sums.shape), local.attrs.eps, local.sum)
        y: Tensor = Normalize.apply(x, weight, bias, *args)[0]  # type: ignore[index]
        return y.to(local.layer.dtype)

    def stock(self, local: Local, x: Tensor, params: Params) -> Tensor:
        """The norm of groups that lie on this rank."""
        raise NotImplementedError

    def grouping(self, local: Local, x: Tensor, sums: Shape) -> Grouped:
        """The groups of the local elements, and how many elements each has on all ranks."""
        raise NotImplementedError

    def weight_view(self, x: Tensor, weight: Tensor) -> list[int]:
        return [1, -1, *[1] * (x.ndim - 2)]

    def flops(self, split: Split) -> np.ndarray:
        return 8.0 * self.output(split).numels


@operator("batch_norm", "batch_norm")
class BatchNorm(Norm):
    """Statistics per channel over samples and space; parameters follow the channels."""

    labels_by_position = True
    counts_batches = True

    def num_sums(self, layer: Layer) -> int:
        return 0 if layer.traits.idle else super().num_sums(layer)

    def read(self, call: Call) -> Request | None:
        if len(call.shape()) < 2:
            return None
        mode = call.mode(call["training"])
        if call["training"]:
            call.check_written("running_mean", "running_var")
        traits = replace(mode, always=mode.always or call["running_mean"] is None)
        attrs = BatchNormAttrs(call["eps"], call["momentum"])
        names = ("input", "weight", "bias", "running_mean", "running_var")
        return Request("batch_norm", call.pick(*names), attrs, traits=traits)

    def makes_new_tensor(self, layer: Layer) -> bool:
        return True

    def sums(self, split: Split) -> Layout | None:
        if split.degree("n", "d", "h", "w") == 1:
            return None
        channels = split.layer.shape[1]
        return Layout.of((2, 1, channels), [split.whole(2), split.whole(1), split.dim_ranges(1)])

    def run(self, local: Local[BatchNormAttrs], tensors: list[Tensor]) -> Tensor:
        given = tensors if len(tensors) == 5 else local.tensors(tensors)
        x, weight, bias, mean, var = given
        assert x is not None
        training = is_active(local)
        count = prod(local.layer.shape) // local.layer.shape[1]
        if training and count <= 1:
            raise ShardwiseError(
                f"layer {local.layer.name!r}: batch norm needs more than one value per channel in "
                f"training, and got input {'x'.join(map(str, local.layer.shape))}"
            )
        momentum = self._momentum(local) if training else 0.0
        if not training and x.numel() == 0:
            return x
        if not training or local.sums is None:
            how = (training, momentum, local.attrs.eps, torch.backends.cudnn.enabled)
            return _with_dense_gradient(torch.batch_norm(x, weight, bias, mean, var, *how), x)
        if x.numel() == 0:  # no samples here, yet the statistics of this rank's channels move on
            x = x.reshape(0, local.sums.shape[2], *[1] * (x.ndim - 2))
        args = (count, local.attrs.eps, local.sum)
        y, batch_mean, batch_var = NormalizeChannels.apply(x, weight, bias, *args)  # type: ignore[misc]
        if mean is not None and var is not None:
            with torch.no_grad():
                mean.lerp_(batch_mean.view(-1).to(mean), momentum)
                var.lerp_((batch_var.view(-1) * (count / (count - 1))).to(var), momentum)
        shape = local.output.shape
        return y if y.shape == shape else y.reshape(shape)  # a view would be dear to overwrite

    @staticmethod
    def _momentum(local: Local[BatchNormAttrs]) -> float:
        """The weight of this batch in the running statistics; None means a plain average."""
        module = local.module
        if not isinstance(module, _BatchNorm):
            return local.attrs.momentum
        if module.momentum is None:
            return 1.0 / max(1.0, float(module.num_batches_tracked or 0))
        return module.momentum


@operator("instance_norm", "instance_norm")
class InstanceNorm(Norm):
    """Statistics per sample and channel, over space."""

    def read(self, call: Call) -> Request | None:
        if call["running_mean"] is not None:  # running statistics of instances: kept whole
            if call["use_input_stats"]:
                call.check_written("running_mean", "running_var")
            return None
        tensors = call.pick("input", "weight", "bias")
        return Request("instance_norm", tensors, NormAttrs(call["eps"]))

    def sums(self, split: Split) -> Layout | None:
        if not split.splits_space:
            return None
        shape = (2, *split.layer.shape[:2])
        return Layout.of(shape, [split.whole(2), split.dim_ranges(0), split.dim_ranges(1)])

    def stock(self, local: Local[NormAttrs], x: Tensor, params: Params) -> Tensor:
        fixed = (True, 0.0, local.attrs.eps, torch.backends.cudnn.enabled)
        return torch.instance_norm(x, *params, None, None, *fixed)

    def grouping(self, local: Local, x: Tensor, sums: Shape) -> Grouped:
        space = tuple(range(2, x.ndim))
        return Grouping(space, tuple(x.shape), sums), prod(local.layer.shape[2:])


@operator("group_norm", "group_norm")
class GroupNorm(Norm):
    """Statistics per sample and group of channels; blocks of channels may cut a group."""

    degrees_matter = True

    def read(self, call: Call) -> Request:
        attrs = GroupNormAttrs(call["eps"], call["num_groups"])
        return Request("group_norm", call.pick("input", "weight", "bias"), attrs)

    def makes_new_tensor(self, layer: Layer) -> bool:
        return True

    def sums(self, split: Split[GroupNormAttrs]) -> Layout | None:
        groups = split.layer.attrs.groups
        aligned = groups % split.dim_degree(1) == 0
        if not split.splits_space and (aligned or split.dim_degree(1) == 1):
            return None
        shape = (2, split.layer.shape[0], groups)
        held = rows(split.dim_ranges(1), split.layer.shape[1] // groups)
        return Layout.of(shape, [split.whole(2), split.dim_ranges(0), held])

    def stock(self, local: Local[GroupNormAttrs], x: Tensor, params: Params) -> Tensor:
        groups = x.shape[1] // (local.layer.shape[1] // local.attrs.groups)
        # torch.nn.functional's one asks for more than one value in the block of this rank
        return torch.group_norm(x, groups, *params, local.attrs.eps)

    def grouping(self, local: Local[GroupNormAttrs], x: Tensor, sums: Shape) -> Grouped:
        per_group = local.layer.shape[1] // local.attrs.groups
        start, stop = local.output.starts[1], local.output.stops[1]
        index = torch.arange(start, stop, device=x.device) // per_group - start // per_group
        one_hot = functional.one_hot(index, -(-stop // per_group) - start // per_group).double()
        grouping = Grouping(tuple(range(2, x.ndim)), tuple(x.shape), sums, one_hot)
        return grouping, per_group * prod(local.layer.shape[2:])


@operator("layer_norm", "layer_norm")
class LayerNorm(Norm):
    """Statistics over the last dimensions, for each index of the leading ones."""

    num_statistics = 2  # of each group

    def read(self, call: Call) -> Request | None:
        attrs = LayerNormAttrs(call["eps"], len(call["normalized_shape"]))
        return Request("layer_norm", call.pick("input", "weight", "bias"), attrs)

    def parameter(self, split: Split, shape: tuple[int, ...]) -> Layout:
        lead = len(split.layer.shape) - len(shape)
        return Layout.of(shape, [split.dim_ranges(lead + dim) for dim in range(len(shape))])

    def sums(self, split: Split[LayerNormAttrs]) -> Layout | None:
        lead, each = len(split.layer.shape) - split.layer.attrs.num_dims, self.num_statistics
        if all(split.dim_degree(dim) == 1 for dim in range(lead, len(split.layer.shape))):
            return None
        if lead == 0:  # one group
            return Layout.of((each, 1), [split.whole(each), split.whole(1)])
        shape = (each, *split.layer.shape[:lead])
        return Layout.of(shape, [split.whole(each), *(split.dim_ranges(d) for d in range(lead))])

    def stock(self, local: Local[LayerNormAttrs], x: Tensor, params: Params) -> Tensor:
        shape = x.shape[x.ndim - local.attrs.num_dims :]
        return functional.layer_norm(x, shape, *params, local.attrs.eps)

    def grouping(self, local: Local[LayerNormAttrs], x: Tensor, sums: Shape) -> Grouped:
        lead = x.ndim - local.attrs.num_dims
        within = tuple(range(lead, x.ndim))
        return Grouping(within, tuple(x.shape), sums), prod(local.layer.shape[lead:])

    def weight_view(self, x: Tensor, weight: Tensor) -> list[int]:
        return list(weight.shape)


@operator("rms_norm", "rms_norm")
class RMSNorm(LayerNorm):
    """Division by the root of the mean square: no mean is taken away, and nothing is added."""

    num_statistics = 1

    def read(self, call: Call) -> Request | None:
        if call.node.meta["val"].is_complex():
            return None
        attrs = LayerNormAttrs(call["eps"], len(call["normalized_shape"]))
        return Request("rms_norm", call.pick("input", "weight"), attrs)

    def num_sums(self, layer: Layer) -> int:
        return 1

    def run(self, local: Local[LayerNormAttrs], tensors: list[Tensor]) -> Tensor:
        x, weight = local.tensors(tensors)
        assert x is not None
        eps, shape = local.attrs.eps, x.shape[x.ndim - local.attrs.num_dims :]
        if local.sums is None:
            return functional.rms_norm(x, shape, weight, eps)
        eps = torch.finfo(precise(x.dtype)).eps if eps is None else eps
        grouping, count = self.grouping(local, x, local.sums.shape)
        y: Tensor = NormalizeSize.apply(x, weight, grouping, count, eps, local.sum)  # type: ignore
        return y.to(local.layer.dtype)


@operator("weight_norm", "_weight_norm")
class WeightNorm(Strategy):
    """A direction v times a length g, one for every index of a dimension: only that one is cut."""

    keeps_inputs, draws = True, False
    as_called = True

    def read(self, call: Call) -> Request:
        return Request("weight_norm", call.pick("v", "g"), DimAttrs(call["dim"]))

    def labels(self, attrs: DimAttrs, shape: Shape, inputs: Inputs) -> str:
        return "".join("c" if dim == attrs.dim else "." for dim in range(len(shape)))

    def needs(self, split: Split[DimAttrs]) -> tuple[Need, ...]:
        return tuple(Need(broadcast(split, o.shape)) for o in split.layer.operands)

    def run(self, local: Local[DimAttrs], tensors: list[Tensor]) -> Tensor:
        return local.layer.call(tensors)

    def flops(self, split: Split) -> np.ndarray:
        return 4.0 * self.output(split).numels
