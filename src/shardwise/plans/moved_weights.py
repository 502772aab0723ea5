"""Weights that layers need elsewhere than they lie: these are moved there, as values are.

Blocks lie where the layers that a plan was made for need them. An image of another size, or
evaluation, may need others: a table of positions is cut to the image, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from shardwise.geometry.layout import Layout
from shardwise.graph.layer_graph import Layer, LayerGraph, Operand
from shardwise.operators.stored import StoredAttrs
from shardwise.plans.plan import Plan
from shardwise.plans.program import stored_needs


def with_moved_weights(
    graph: LayerGraph,
    plan: Plan,
    held: Mapping[str, Layout],
    dtype_of: Callable[[str], torch.dtype],
) -> LayerGraph:
    """The same graph, in which layers read as values those parameters that ranks do not hold.

    Buffers are not moved: layers may write into them.
    """
    moved = {
        (layer.name, operand): f"{operand.name} stored"
        for layer, operand, layout in stored_needs(graph, plan)
        if operand.kind == "param" and operand.name in held
        if not layout.is_within(held[operand.name])
    }
    if not moved:
        return graph

    def read(layer: Layer) -> Layer:
        values = {
            o: replace(o, kind="value", name=n) for (at, o), n in moved.items() if at == layer.name
        }
        return (
            replace(layer, operands=tuple(values.get(o, o) for o in layer.operands))
            if values
            else layer
        )

    def stored(operand: Operand, name: str) -> Layer:
        attrs, dims = StoredAttrs(held[operand.name].owners()), "." * len(operand.shape)
        dtype = dtype_of(operand.name)
        return Layer(name, "stored", (operand,), operand.shape, dims, attrs, dtype=dtype)

    added = {name: stored(operand, name) for (_, operand), name in moved.items()}
    return replace(graph, layers=(*added.values(), *map(read, graph.layers)))
