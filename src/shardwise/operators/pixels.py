"""Space to depth and back: squares of positions become channels, and channels squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout
from shardwise.operators.calls import Call, Request
from shardwise.operators.shape import Moves
from shardwise.operators.splits import Split, rows
from shardwise.operators.strategy import Local, Need, narrow, operator

# Tensors are [..., C, H, W], with any number of dimensions before.


@dataclass(frozen=True)
class PixelShuffleAttrs:
    factor: int


@operator("pixel_shuffle", "pixel_shuffle")
class PixelShuffle(Moves):
    """Depth to space: r*r channels become a square of r x r positions."""

    def read(self, call: Call) -> Request:
        return Request("pixel_shuffle", (call.x,), PixelShuffleAttrs(call["upscale_factor"]))

    def needs(self, split: Split[PixelShuffleAttrs]) -> tuple[Need, ...]:
        shape, r = split.layer.operands[0].shape, split.layer.attrs.factor
        *lead, channels, height, width = split.all_ranges()
        ranges = [*lead, channels * r * r, rows(height, r), rows(width, r)]
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local[PixelShuffleAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        r, held, out = local.attrs.factor, local.needs[0], local.output
        starts = (*out.starts[:-2], *(start * r for start in held.starts[-2:]))
        stops = (*out.stops[:-2], *(stop * r for stop in held.stops[-2:]))
        return narrow(torch.pixel_shuffle(tensors[0], r), Box(starts, stops), out)


@operator("pixel_unshuffle", "pixel_unshuffle")
class PixelUnshuffle(Moves):
    """Space to depth: a square of r x r positions becomes r*r channels."""

    def read(self, call: Call) -> Request:
        return Request("pixel_unshuffle", (call.x,), PixelShuffleAttrs(call["downscale_factor"]))

    def needs(self, split: Split[PixelShuffleAttrs]) -> tuple[Need, ...]:
        shape, r = split.layer.operands[0].shape, split.layer.attrs.factor
        *lead, channels, height, width = split.all_ranges()
        ranges = [*lead, rows(channels, r * r), height * r, width * r]
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local[PixelShuffleAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        r, held, out = local.attrs.factor, local.needs[0], local.output
        made = held.starts[-3] * r * r, held.stops[-3] * r * r
        starts = (*out.starts[:-3], made[0], *out.starts[-2:])
        stops = (*out.stops[:-3], made[1], *out.stops[-2:])
        return narrow(torch.pixel_unshuffle(tensors[0], r), Box(starts, stops), out)
