"""What can be asked of a call of an ATen operator, whatever the model that makes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.errors import CaptureError
from shardwise.model.in_place import is_in_place, named_args
from shardwise.operators.aten import MADE, OVERWRITING

_BERNOULLI = torch.ops.aten.bernoulli.p


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


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensors among a call's arguments, each once, in order."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def draws(node: fx.Node) -> bool:
    """Whether an operator uses random numbers."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    args = named_args(node)
    off = args.get("train", args.get("training")) is False
    never = 0.0 in (args.get("p", 1.0), args.get("dropout_p", 1.0), args.get("dropout", 1.0))
    return not off and not never


def is_made(node: fx.Node, name: str) -> bool:
    """Whether the result depends on nothing but shapes and, perhaps, random numbers."""
    tensors = tensor_nodes(node)
    if name in MADE:
        return len(tensors) <= (name.endswith("_like") or name.startswith("new_"))
    if not draws(node):
        return False
    overwrites = is_in_place(node) and name in OVERWRITING
    only_like = name.endswith("_like") or node.target is _BERNOULLI
    return len(tensors) <= (overwrites or only_like)


def names_of(target: Any) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in target._schema.arguments]


def is_an_argument(target: Any, name: str) -> bool:
    """Whether any overload of an operator has such an argument."""
    packet = getattr(target, "overloadpacket", None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    return any(name == a.name for each in overloads for a in each._schema.arguments)
