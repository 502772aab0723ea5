"""Triangles and diagonals of matrices, in any two dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import each_once
from shardwise.operators.calls import Call, Request
from shardwise.operators.shape import Moves
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, operator


@dataclass(frozen=True)
class TriangleAttrs:
    upper: bool
    diagonal: int


@operator("triangle", "tril", "triu")
class Triangle(Moves):
    """What lies above or below a diagonal is nought; a block has its own diagonal."""

    def read(self, call: Call) -> Request:
        return Request("triangle", (call.x,), TriangleAttrs(call.name == "triu", call["diagonal"]))

    def needs(self, split: Split) -> tuple[Need, ...]:
        return (Need(self.output(split)),)

    def run(self, local: Local[TriangleAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        row, column = local.output.starts[-2:]
        cut = torch.triu if local.attrs.upper else torch.tril
        return cut(tensors[0], local.attrs.diagonal + row - column)


@dataclass(frozen=True)
class DiagonalAttrs:
    offset: int
    dims: tuple[int, int]


@operator("diagonal", "diagonal")
class Diagonal(Moves):
    """The elements of a diagonal stand in the last dimension."""

    free = True

    def read(self, call: Call) -> Request:
        x = call.model.labels_of(call.x)
        dims = call["dim1"] % len(x), call["dim2"] % len(x)
        left = [label for dim, label in enumerate(x) if dim not in dims]
        labels = each_once("".join([*left, x[dims[0]]]), call.result)
        attrs = DiagonalAttrs(call["offset"], dims)
        return Request("diagonal", (call.x,), attrs, dims=labels)

    def needs(self, split: Split[DiagonalAttrs]) -> tuple[Need, ...]:
        shape, a = split.layer.operands[0].shape, split.layer.attrs
        *others, on = split.all_ranges()
        left = iter(others)
        filled = (on[:, 1] > on[:, 0])[:, None]
        square = {a.dims[0]: max(-a.offset, 0), a.dims[1]: max(a.offset, 0)}
        ranges: list[Ranges] = [
            (on + square[dim]) * filled if dim in square else next(left)
            for dim in range(len(shape))
        ]
        return (Need(Layout.of(shape, ranges)),)

    def run(self, local: Local[DiagonalAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].diagonal(0, *local.attrs.dims)
