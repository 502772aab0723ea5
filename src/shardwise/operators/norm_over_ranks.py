"""Normalisation with the statistics of groups that span ranks, forward and backward.

Every norm is the same computation over another grouping of elements: `project` sums a tensor over
each group, `expand` spreads one value per group over its elements. Ranks that hold parts of a
group add up their sums (`Local.sum`): one message of two numbers per group, in each direction. In
float64, which has no wider type to add squares in, the variance takes a message of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from shardwise.tensors import memory_format_of

Total = Callable[[torch.Tensor], torch.Tensor]  # adds up what all ranks have


class Grouping:
    """How the elements of a local block fall into groups that share their statistics."""

    def __init__(
        self,
        dims: tuple[int, ...],
        shape: tuple[int, ...],
        sums: tuple[int, ...],
        groups: Any = None,
    ) -> None:
        self.dims = dims  # summed over
        self.kept = [1 if dim in dims else size for dim, size in enumerate(shape)]
        self.sums = sums[0], sums[1], prod(sums[2:])  # of what is summed: two numbers per group
        self.groups = groups  # a one-hot [channels, groups], where channels share statistics

    def nothing(self, x: torch.Tensor) -> torch.Tensor:
        """What a rank without elements adds."""
        return x.new_zeros(self.sums, dtype=torch.float64)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        sums = x.double()
        if self.dims:  # else torch would sum over all
            sums = _as_matrix(x.sum(self.dims, keepdim=True, dtype=torch.float64))
        return sums if self.groups is None else sums @ self.groups

    def expand(self, stats: torch.Tensor) -> torch.Tensor:
        values = stats if self.groups is None else stats @ self.groups.T
        return values.view(self.kept)

    def normal(
        self, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x with mean 0 and variance 1, and by what it was scaled, with the digits of `precise`."""
        digits = precise(x.dtype)
        scale = self.expand(rstd).to(digits)
        return (x - self.expand(mean).to(digits)) * scale, scale

    def moments(self, x: torch.Tensor) -> torch.Tensor:
        """Sum and sum of squares per group, in float64 so that they can be added safely; [2, ...].

        The local mean and variance are computed first: squares of float32 are never summed.
        """
        if x.numel() == 0:
            return self.nothing(x)
        count = prod(x.shape[dim] for dim in self.dims)
        mean, var = x.double(), x.new_zeros(x.shape, dtype=torch.float64)
        if self.dims:
            values = x.to(precise(x.dtype))
            var, mean = torch.var_mean(values, self.dims, correction=0, keepdim=True)
            mean, var = _as_matrix(mean.double()), _as_matrix(var.double())
        sums = torch.stack([mean * count, (var + mean * mean) * count])
        return sums if self.groups is None else sums @ self.groups

    def squares(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """The sum of squared distances from the mean, per group, below one of nothing; [2, ...]."""
        sums = self.nothing(x)
        if x.numel():
            sums[1] = self.project((x - self.expand(mean)).square())
        return sums


def _as_matrix(sums: torch.Tensor) -> torch.Tensor:
    """One row for each index of the first dimension; all is one group where there is no other."""
    return sums.flatten(1) if sums.ndim > 1 else sums[None]


def statistics(
    x: torch.Tensor, grouping: Grouping, count: int, total: Total
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of groups that span ranks."""
    sums = total(grouping.moments(x))
    mean = sums[0] / count
    if x.dtype is torch.float64:
        return mean, total(grouping.squares(x, mean))[1] / count
    return mean, (sums[1] / count - mean * mean).clamp_min(0)


class Normalize(torch.autograd.Function):
    """y = (x - mean) * rstd * weight + bias, with mean and rstd over groups that span ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, grouping, count, eps, total):  # type: ignore[no-untyped-def]
        mean, var = statistics(x, grouping, count, total)
        rstd = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias = bias is not None
        ctx.grouping, ctx.count, ctx.total = grouping, count, total
        ctx.mark_non_differentiable(mean, var)
        if x.numel() == 0:
            return torch.empty_like(x), mean, var
        normal, _ = grouping.normal(x, mean, rstd)
        y = normal
        if weight is not None:
            y = normal * weight if bias is None else torch.addcmul(bias, normal, weight)
        return y, mean, var

    @staticmethod
    def backward(ctx, dy, _mean, _var):  # type: ignore[no-untyped-def]
        x, weight, mean, rstd = ctx.saved_tensors
        grouping, count = ctx.grouping, ctx.count
        if x.numel() == 0:
            ctx.total(grouping.nothing(x))
            dw = None if weight is None else torch.zeros_like(weight)
            return torch.empty_like(x), dw, dw if ctx.bias else None, None, None, None, None
        normal, scale = grouping.normal(x, mean, rstd)
        dy, dw, db = dy.to(normal.dtype), None, None
        if weight is not None:
            dw = (dy * normal).sum_to_size(weight.shape)
            db = dy.sum_to_size(weight.shape) if ctx.bias else None
            dy = dy * weight
        sums = torch.stack([grouping.project(dy), grouping.project(dy * normal)])
        means = ctx.total(sums) / count
        first, second = (grouping.expand(m).to(normal.dtype) for m in means)
        dx = ((dy - first - normal * second) * scale).to(x.dtype)
        return dx, dw, db, None, None, None, None


class NormalizeSize(torch.autograd.Function):
    """y = x * weight / size, with the root of the mean square over groups that span ranks."""

    @staticmethod
    def forward(ctx, x, weight, grouping, count, eps, total):  # type: ignore[no-untyped-def]
        values = x.to(precise(x.dtype))
        squares = grouping.project(values.square()) if x.numel() else grouping.nothing(x)[0]
        rstd = (total(squares.unsqueeze(0))[0] / count + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        ctx.grouping, ctx.count, ctx.total = grouping, count, total
        if x.numel() == 0:
            return torch.empty_like(x)
        normal = values * grouping.expand(rstd).to(values.dtype)
        return normal if weight is None else normal * weight

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight, rstd = ctx.saved_tensors
        grouping = ctx.grouping
        if x.numel() == 0:
            ctx.total(grouping.nothing(x)[:1])
            dw = None if weight is None else torch.zeros_like(weight)
            return torch.empty_like(x), dw, None, None, None, None
        values = x.to(precise(x.dtype))
        scale = grouping.expand(rstd).to(values.dtype)
        normal, dy, dw = values * scale, dy.to(values.dtype), None
        if weight is not None:
            dw, dy = (dy * normal).sum_to_size(weight.shape), dy * weight
        sums = grouping.project(dy * normal).unsqueeze(0)
        along = grouping.expand(ctx.total(sums)[0] / ctx.count).to(values.dtype)
        dx = ((dy - normal * along) * scale).to(x.dtype)
        return dx, dw, None, None, None, None


class NormalizeChannels(torch.autograd.Function):
    """`Normalize` where a group is a channel: torch's own batch norm, given the statistics.

    Its evaluation is one pass over x, and the backward pass of that gives all sums in another.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, count, eps, total):  # type: ignore[no-untyped-def]
        sums = x.new_zeros([2, x.shape[1]], dtype=torch.float64)
        if x.numel():
            local_mean, local_var = _statistics(x)
            mean, var, own = local_mean.double(), local_var.double(), x.numel() // x.shape[1]
            sums = torch.stack([mean * own, (var + mean * mean) * own])
        mean, squares = total(sums.unsqueeze(1)).squeeze(1) / count
        var = (squares - mean * mean).clamp_min(0)
        if x.dtype is torch.float64:
            dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
            sums[1] = (x - mean.view(shape)).square().sum(dims)
            var = total(sums.unsqueeze(1)).squeeze(1)[1] / count
        digits = precise(x.dtype)
        given = mean.to(digits), var.to(digits)
        ctx.save_for_backward(x, weight, *given)
        ctx.bias, ctx.count, ctx.eps, ctx.total = bias is not None, count, eps, total
        ctx.mark_non_differentiable(mean, var)
        if x.numel() == 0:
            return torch.empty_like(x), mean, var
        scale, offset = (None if p is None else p.to(digits) for p in (weight, bias))
        y = torch.native_batch_norm(x, scale, offset, *given, False, 0.0, eps)[0]
        return y, mean, var

    @staticmethod
    def backward(ctx, dy, _mean, _var):  # type: ignore[no-untyped-def]
        x, weight, mean, var = ctx.saved_tensors
        rstd = (var.double() + ctx.eps).rsqrt()
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if x.numel():
            memory_format = memory_format_of(x)
            x, dy = (t.contiguous(memory_format=memory_format) for t in (x, dy))
            saved = mean, rstd.to(mean.dtype)  # which GPUs ask for, some of them to no purpose
            args = (mean, var, *saved, False, ctx.eps, [True, True, True])
            dx, dw, db = torch.ops.aten.native_batch_norm_backward(dy, x, scale, *args)
        else:
            dx, dw, db = torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        sums = torch.stack([db, dw]).double() * scale
        first, second = ctx.total(sums.unsqueeze(1)).squeeze(1) / ctx.count
        slope = -rstd * rstd * second
        offset = -rstd * first - slope * mean
        shape = [1, -1, *[1] * (x.ndim - 2)]
        slope, offset = (t.to(mean.dtype).view(shape) for t in (slope, offset))
        dx = dx.to(mean.dtype).addcmul_(x, slope).add_(offset).to(x.dtype)
        return dx, dw if weight is not None else None, db if ctx.bias else None, None, None, None


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of every channel of a block."""
    if precise(x.dtype) is x.dtype:
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    dims = [0, *range(2, x.ndim)]
    var, mean = torch.var_mean(x.to(precise(x.dtype)), dims, correction=0)
    return mean, var


def precise(dtype: torch.dtype) -> torch.dtype:
    """What statistics are kept in: those of 16 bits have too few digits for their differences."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
