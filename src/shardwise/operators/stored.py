"""Weights as values: what ranks hold of them can then be moved to others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer
from shardwise.operators.shape import Moves
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, Need, operator


@dataclass(frozen=True)
class StoredAttrs:
    layout: Layout  # of the blocks, each on one of the ranks that hold it


@operator("stored")
class StoredWeight(Moves):
    """A weight that lies where its blocks do, whatever the config; no call of a model is read."""

    free = True

    def axes(self, layer: Layer) -> dict[str, int]:
        return {}

    def output(self, split: Split[StoredAttrs]) -> Layout:
        return split.layer.attrs.layout

    def needs(self, split: Split[StoredAttrs]) -> tuple[Need, ...]:
        return (Need(split.layer.attrs.layout),)

    def run(self, local: Local[StoredAttrs], tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]
