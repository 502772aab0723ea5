"""Sampling at given positions (`grid_sample`), in all its modes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.geometry.layout import Layout
from shardwise.operators.calls import Call, Request
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, Strategy, operator


@dataclass(frozen=True)
class GridSampleAttrs:
    how: tuple[int, int, bool]  # the numbers of its modes, and whether corners are aligned


@operator("grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
class GridSample(Strategy):
    """Samples, channels and positions may be split; a position may read anything of its image."""

    keeps_inputs, draws = True, False
    labels_by_position = True

    def read(self, call: Call) -> Request:
        names = ("interpolation_mode", "padding_mode", "align_corners")
        return Request(
            "grid_sample", call.pick("input", "grid"), GridSampleAttrs(call.pick(*names))
        )

    def needs(self, split: Split) -> tuple[Need, ...]:
        x, grid = (operand.shape for operand in split.layer.operands)
        samples, channels, *space = (split.dim_ranges(dim) for dim in range(len(x)))
        image = Layout.of(x, [samples, channels, *map(split.whole, x[2:])])
        return Need(image), Need(Layout.of(grid, [samples, *space, split.whole(grid[-1])]))

    def run(self, local: Local[GridSampleAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        x, grid = tensors
        return torch.grid_sampler(x, grid, *local.attrs.how)
