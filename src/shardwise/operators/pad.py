"""Padding and cropping: with a constant, or with what the tensor has at its edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.geometry.layout import Layout
from shardwise.graph.labels import Shape
from shardwise.operators.calls import PREVIOUS, Call, Request, Requests
from shardwise.operators.rearrange import Join, Stretch, joined
from shardwise.operators.shape import Moves
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, operator

Pads = list[tuple[int, int]]  # before and behind, of every dimension
EDGES = {
    **{f"reflection_pad{n}d": "reflect" for n in (1, 2, 3)},
    **{f"replication_pad{n}d": "replicate" for n in (1, 2, 3)},
    "_pad_circular": "circular",
}


@dataclass(frozen=True)
class PadAttrs:
    pads: tuple[tuple[int, int], ...]
    value: float


@operator("pad", "pad", "constant_pad_nd", *EDGES)
class Pad(Moves):
    """Zero (or constant) padding, cropping included: the transfer's fill does it."""

    reads_beyond = True
    part_of_layer = True

    def read(self, call: Call) -> Request | Requests:
        mode = EDGES.get(call.name) or call.args.get("mode", "constant")
        shape = call.shape()
        given = (
            call["padding"] if call.name in EDGES and call.name != "_pad_circular" else call["pad"]
        )
        flat = [*given, *[0] * (2 * len(shape) - len(given))]
        pads = [(flat[2 * i], flat[2 * i + 1]) for i in reversed(range(len(shape)))]
        if mode != "constant":
            return EdgePad.along(call.x, shape, pads, mode)
        return Request("pad", (call.x,), PadAttrs(tuple(pads), call["value"] or 0))

    def needs(self, split: Split[PadAttrs]) -> tuple[Need, ...]:
        attrs, shape = split.layer.attrs, split.layer.operands[0].shape
        pairs = zip(split.all_ranges(), attrs.pads, strict=True)
        ranges = [(found - left) * split.used[:, None] for found, (left, _) in pairs]
        return (Need(Layout.of(shape, ranges), float(attrs.value)),)

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]


@operator("edge_pad")
class EdgePad(Join):
    """Circular, reflecting and replicating padding of one dimension.

    The operand is needed three times: what lies left of it, itself, and what lies right of it.
    """

    part_of_layer = True

    @staticmethod
    def along(x: Any, shape: Shape, pads: Pads, mode: str) -> Requests:
        """Padding with the tensor's own values, one dimension after the other."""
        made, found = list(shape), []
        for dim, (left, right) in enumerate(pads):
            if left or right:
                stretches = _edges(mode, left, right)
                made[dim] += left + right
                x = PREVIOUS if found else x
                found.append(joined("edge_pad", dim, [(x, p) for p in stretches], tuple(made)))
        return found


def _edges(mode: str, left: int, right: int) -> tuple[Stretch, Stretch, Stretch]:
    """What lies left of a dimension, itself, and what lies right; less than nothing is cut off."""
    first, cut = max(-left, 0), max(-right, 0)
    if mode == "circular":  # of what is left of it
        return Stretch(-cut - left, left), Stretch(first), Stretch(first, right)
    if mode == "reflect":
        return Stretch(left, left, -1), Stretch(first), Stretch(-2, right, -1)
    return Stretch(0, left, 0), Stretch(first), Stretch(-1, right, 0)
