"""ATen calls with places for their tensors, as layers keep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from shardwise.errors import CaptureError
from shardwise.graph.layer_graph import Like
from shardwise.operators.calls import named_args, names_of


def call_template(
    called: fx.Node, places: Mapping[Any, Any], plain: Callable[[Any], Any]
) -> dict[str, Any]:
    """The target and the arguments of a call, with places for its tensors and plain numbers."""

    def template(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            filled = [template(item) for item in value]
            return tuple(filled) if isinstance(value, tuple) else filled
        is_tensor = isinstance(value, fx.Node) and value in places
        return places[value] if is_tensor else plain(value)

    overwrites = any(isinstance(place, Like) for place in places.values())  # a new tensor
    target = called.target if overwrites else pure(called.target)
    args, kwargs = called.args, called.kwargs
    if sorted(names_of(target)) == sorted(names_of(called.target)) and target is not called.target:
        args, kwargs = (), named_args(called)  # the twin may have another order
    return {
        "target": str(target),
        "args": tuple(template(argument) for argument in args),
        "kwargs": {key: template(argument) for key, argument in kwargs.items()},
    }


def pure(target: Any) -> Any:
    """The operator that is not in place, or the operator itself."""
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.startswith("_"):
        return target
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    same_name = [each for each in overloads if each._overloadname == target._overloadname]
    same_types = [each for each in overloads if _types(each) == _types(target)]
    for twin in (*same_types, *same_name):
        if len(names_of(twin)) == len(names_of(target)):
            return twin
    raise CaptureError(f"the in-place operator {target} has no twin that is not in place")


def _types(target: Any) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]
