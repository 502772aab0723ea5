"""Labels of what is made of nothing but shapes, masks say: those by which its readers cut it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.geometry.grid import Config
from shardwise.graph.labels import each_once
from shardwise.graph.layer_graph import Layer
from shardwise.operators.splits import LABEL_AXES, Split
from shardwise.operators.strategy import STRATEGIES


def labelled_by_readers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The same layers, with labels for those that follow from no input.

    A causal mask begins as a row of numbers that has no samples or space, and would be made on one
    worker, all of it: of a video's 40,000 steps 1.6 GB. What readers need whole is cut as what it
    is made of.
    """
    named = {layer.name: layer for layer in layers}
    readers: dict[str, list[str]] = {}
    for layer in layers:
        for name in layer.inputs:
            readers.setdefault(name, []).append(layer.name)
    unlabelled = _unlabelled(layers)
    for layer in reversed(unlabelled):
        found = (_cut_by(named[reader], layer) for reader in readers.get(layer.name, ()))
        dims = next((each for each in found if each.strip(".")), layer.dims)
        named[layer.name] = replace(layer, dims=dims)
    for layer in unlabelled:
        sources = [(named[name].shape, named[name].dims) for name in layer.inputs]
        if sources and not named[layer.name].dims.strip("."):
            dims = STRATEGIES[layer.op].labels(layer.attrs, layer.shape, sources)
            named[layer.name] = replace(layer, dims=each_once(dims, layer.shape))
    return tuple(named.values())


def _unlabelled(layers: Sequence[Layer]) -> list[Layer]:
    """Layers without a label that are made, or computed from such layers alone."""
    found: dict[str, Layer] = {}
    for layer in layers:
        strategy = STRATEGIES[layer.op]
        is_made = _are_values(layer, found) if layer.operands else strategy.shapes_only
        if is_made and not layer.dims.strip(".") and strategy.known:
            found[layer.name] = layer
    return list(found.values())


def _are_values(layer: Layer, known: Mapping[str, Layer]) -> bool:
    return all(o.kind == "value" and o.name in known for o in layer.operands)


def _cut_by(reader: Layer, made: Layer) -> str:
    """Labels of what is made: for every axis of a reader, the dimension of which it needs parts."""
    labels, strategy = ["."] * len(made.shape), STRATEGIES[reader.op]
    place = [operand.name for operand in reader.operands].index(made.name)
    limits = strategy.axes(reader)
    for label in dict.fromkeys(reader.dims.replace(".", "")):
        axis = LABEL_AXES[label][0]
        if limits.get(axis, 1) < 2:
            continue
        split: Split = Split(reader, Config(**{axis: 2}), 2)  # type: ignore[arg-type]
        first, second = strategy.needs(split)[place].layout.bounds
        cut = [dim for dim in range(len(labels)) if tuple(first[dim]) != tuple(second[dim])]
        if len(cut) == 1 and labels[cut[0]] == ".":
            labels[cut[0]] = label
    return "".join(labels)
