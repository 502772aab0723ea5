"""Layers that shall have a split that somebody names: which configs that leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from shardwise.errors import PlanError, ShardwiseError
from shardwise.geometry.grid import Config
from shardwise.geometry.split_text import parse_config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES
from shardwise.planner.costs import Costs, usual

Pins = Mapping[str, str | Config]


def pinned(costs: Costs, pins: Pins) -> Costs:
    """The costs of a graph in which these layers have these splits."""
    if not pins:
        return costs
    return costs.pinned({name: meant(costs, name, split) for name, split in pins.items()})


def meant(costs: Costs, name: str, split: str | Config) -> tuple[Config, ...]:
    """The configs that a split stands for: without ranks it may lie wherever candidates do."""
    layer = planned_layer(costs.graph, name, "to pin")
    config, exact = (split, True) if isinstance(split, Config) else _parsed(costs, name, split)
    STRATEGIES[layer.op].check(layer, config, costs.world)
    config = usual(layer, config)
    kind = config.degrees, config.gradient
    tried = costs.candidates.configs(layer, costs.graph.batch)
    alike = tuple(c for c in tried if (c.degrees, c.gradient) == kind)
    found = (config,) if exact or not alike else alike
    if name in costs.graph.outputs:
        found = _wanted(costs, layer, found)
    return found


def _parsed(costs: Costs, name: str, split: str) -> tuple[Config, bool]:
    try:
        return parse_config(split, costs.world)
    except ShardwiseError as error:
        raise type(error)(f"layer {name!r}: {error}") from None


def _wanted(costs: Costs, layer: Layer, configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Those of an output's configs that leave ranks all the classes that their losses need."""
    own = costs.under(layer, configs)
    lacking = costs.unwanted(layer, own.outputs)[own.outputs.index]
    found = tuple(config for config, lacks in zip(configs, lacking, strict=True) if not lacks)
    if not found:
        raise PlanError(
            f"layer {layer.name!r}: {configs[0]} leaves ranks with a part of the classes, and "
            f"their losses need all"
        )
    return found


def planned_layer(graph: LayerGraph, name: str, purpose: str) -> Layer:
    """A layer that is no input; a name that there is not is answered with the nearest."""
    if name in graph and not graph[name].is_input:
        return graph[name]
    close = get_close_matches(name, [layer.name for layer in graph.layers], n=1)
    hint = f"; did you mean {close[0]!r}?" if close and close[0] != name else ""
    raise PlanError(f"the model has no layer {name!r} {purpose}{hint}")
