"""Calls of ATen operators in an exported graph, and what is made of them.

An operator reads a `Call` and says which layers compute it: `Request`s, mostly one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shardwise.errors import CaptureError
from shardwise.graph.labels import default_dims
from shardwise.graph.layer_graph import Like, Traits

# -- nodes of a graph ------------------------------------------------------------------------------


def aten_name(node: fx.Node, strip: bool = True) -> str:
    """The operator's name, without the underscore of its in-place twin.

    Operators of others keep their namespace: what they call relu may be anything.
    """
    return _name_of(node.target, strip)


@lru_cache(maxsize=4096)
def _name_of(target: Any, strip: bool) -> str:
    whole = str(getattr(target, "_schema", target)).split("(")[0]
    space, _, name = whole.rpartition("::")
    name = name.split(".")[0]
    name = name.rstrip("_") if strip and not name.startswith("_") else name
    return name if space in ("", "aten") else f"{space}::{name}"


def bare(name: str) -> str:
    """A name without its namespace, for people."""
    return name.rpartition("::")[2]


def is_in_place(node: fx.Node) -> bool:
    name = bare(aten_name(node, strip=False))
    return name.endswith("_") and not name.startswith("_")


def named_args(node: fx.Node) -> dict[str, Any]:
    """Arguments by their schema names, defaults filled in."""
    named = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args):
            named[argument.name] = node.args[position]
        else:
            named[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return named


def names_of(target: Any) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in target._schema.arguments]


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensors among a call's arguments, each once, in order."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors among a call's arguments, as often as they stand there."""
    leaves = tree_leaves((node.args, node.kwargs))
    return [n for n in leaves if isinstance(n, fx.Node) and n in set(tensor_nodes(node))]


def draws(node: fx.Node) -> bool:
    """Whether an operator uses random numbers."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    args = named_args(node)
    off = args.get("train", args.get("training")) is False
    never = 0.0 in (args.get("p", 1.0), args.get("dropout_p", 1.0), args.get("dropout", 1.0))
    return not off and not never


def overloads_of(packet: Any) -> list[Any]:
    """The overloads of an operator, if there is one."""
    return [getattr(packet, each) for each in packet.overloads()] if packet else []


# -- what is asked for -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A layer that is to be made: an operator, its tensors (graph nodes, or None), its attributes.

    Where several requests follow each other, `PREVIOUS` stands for the result of the one before.
    """

    op: str
    tensors: tuple[Any, ...]
    attrs: Any = None  # of the class that its operator has for them
    shape: tuple[int, ...] | None = None  # of the result, where it is not that of the call
    dims: str | None = None  # its labels, where they do not follow from those of its tensors
    dtype: torch.dtype | None = None  # of the result, where it is not that of the call
    traits: Traits = field(default_factory=Traits)

    def __post_init__(self) -> None:
        if self.attrs is not None and not is_dataclass(self.attrs):
            kind = type(self.attrs).__name__
            raise TypeError(f"attributes of operator {self.op!r} are a dataclass, not a {kind}")


PREVIOUS: Any = object()  # stands for the result of the request before
Requests = list[Request]


class Model(Protocol):
    """What a call may ask of the model that makes it."""

    @property
    def training(self) -> bool: ...

    @property
    def batch(self) -> int: ...

    def shape_of(self, tensor: Any) -> tuple[int, ...]: ...

    def labels_of(self, tensor: Any) -> str: ...

    def memory_order_of(self, tensor: Any) -> tuple[int, ...]: ...

    def is_stored(self, tensor: Any) -> bool: ...

    def module_of(self, node: fx.Node) -> str: ...


@dataclass(frozen=True)
class Call:
    """A call of an ATen operator; `item` is which of several results is asked for."""

    node: fx.Node
    args: dict[str, Any]  # by name, defaults filled in, sizes as plain numbers
    model: Model
    item: int | None = None

    @property
    def name(self) -> str:
        return aten_name(self.node)

    @property
    def num_dims(self) -> int:
        """The number in a name such as conv2d."""
        found = re.search(r"([123])d", self.name)
        assert found is not None, self.name
        return int(found[1])

    @property
    def x(self) -> Any:
        """The first tensor, whatever it is called."""
        return self.args["input"] if "input" in self.args else self.args["self"]

    @property
    def in_place(self) -> bool:
        return is_in_place(self.node)

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that not every overload has; no overload having it is a mistake."""
        if name not in self.args and not self.may_have(name):
            raise TypeError(f"no overload of {self.name} has an argument {name!r}")
        return self.args.get(name, default)

    def may_have(self, name: str) -> bool:
        """Whether any overload of the operator has such an argument."""
        overloads = overloads_of(getattr(self.node.target, "overloadpacket", None))
        return any(name in names_of(each) for each in overloads)

    def pick(self, *names: str) -> tuple[Any, ...]:
        return tuple(self.args[name] for name in names)

    def shape(self, tensor: Any = None) -> tuple[int, ...]:
        """The shape of a tensor: of the first one, if it is not said which."""
        return self.model.shape_of(self.x if tensor is None else tensor)

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result that is asked for."""
        value = self.node.meta["val"]
        return self.model.shape_of(value if self.item is None else value[self.item])

    def mode(self, flag: bool) -> Traits:
        """Which module's training flag rules, and whether the operator ignores it."""
        return Traits(
            module=self.model.module_of(self.node),
            always=bool(flag) and not self.model.training,
            never=not flag and self.model.training,  # F.dropout(training=False), say
            idle=not flag,
        )

    def check_written(self, *names: str) -> None:
        """What a norm writes into belongs to the model."""
        for name in names:
            tensor = self.args[name]
            if tensor is not None and not self.model.is_stored(tensor):
                raise CaptureError(
                    f"{self.name} ({self.node}) writes into its {name}, which is no buffer of "
                    "the model; register it as one"
                )


# Operators whose derivative is another one in place: from the result, or none at all.
OTHERWISE_IN_PLACE = frozenset(
    """
    elu selu celu leaky_relu rrelu eq ne lt le gt ge logical_and logical_or logical_xor logical_not
    """.split()  # noqa: SIM905
)


def as_called(op: str, call: Call, overwrites: bool = False) -> Request:
    """A layer that runs the call itself, on parts of its tensors or on the whole ones."""
    traits = Traits(
        called=bare(call.name),
        written=call.in_place,
        in_place=call.in_place and overwrites,
        on_a_copy=call.in_place and call.name in OTHERWISE_IN_PLACE,
        draws=draws(call.node),
    )
    return Request(op, tuple(tensor_nodes(call.node)), traits=traits)


# -- as layers keep it ----------------------------------------------------------------------------


def call_template(
    called: fx.Node, tensors: Sequence[Any], places: Sequence[Any], plain: Callable[[Any], Any]
) -> dict[str, Any]:
    """The target and the arguments of a call, with places for its tensors and plain numbers.

    A tensor that is an argument several times may have several places, in the same order.
    """
    left: dict[Any, list[Any]] = {}
    for tensor, place in zip(tensors, places, strict=True):
        left.setdefault(tensor, []).append(place)

    def template(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            filled = [template(item) for item in value]
            return tuple(filled) if isinstance(value, tuple) else filled
        if not isinstance(value, fx.Node) or value not in left:
            return plain(value)
        return left[value].pop(0) if len(left[value]) > 1 else left[value][0]

    overwrites = any(isinstance(place, Like) for place in places)  # a new tensor
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
    overloads = overloads_of(getattr(torch.ops.aten, name.rstrip("_"), None))
    same_name = [each for each in overloads if each._overloadname == target._overloadname]
    same_types = [each for each in overloads if _types(each) == _types(target)]
    for twin in (*same_types, *same_name):
        if len(names_of(twin)) == len(names_of(target)):
            return twin
    raise CaptureError(f"the in-place operator {target} has no twin that is not in place")


def _types(target: Any) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]


# -- what several operators say alike --------------------------------------------------------------


def per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """An attribute given once or per spatial dimension, as one number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_dims if len(values) == 1 else values


def permuted(name: str, args: Mapping[str, Any], num_dims: int) -> tuple[int, ...]:
    """The order of dimensions that a permutation makes."""
    if name == "permute":
        return tuple(dim % num_dims for dim in args["dims"])
    order = list(range(num_dims))
    if name in ("t", "numpy_T"):
        return tuple(order[::-1])
    a, b = (value for key, value in args.items() if key != "self")
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def of_samples(call: Call, request: Request, num_dims: int) -> Request | Requests:
    """An operator on samples, or on a single one: a batch of one, then."""
    given = call.shape()
    if len(given) != num_dims + 1:
        return request
    return reshaped(call, request, (1, *given), (1, *call.result), default_dims((1, *given)))


def reshaped(
    call: Call, request: Request, given: tuple[int, ...], made: tuple[int, ...], dims: str
) -> Requests:
    """An operator on its first tensor in another shape: that of a batch of one, or of rows."""
    first, *others = request.tensors
    lifted = Request("view", (first,), shape=given, dims=dims, dtype=first.meta["val"].dtype)
    inside = replace(request, tensors=(PREVIOUS, *others), shape=made)
    return [lifted, inside, Request("view", (PREVIOUS,), shape=call.result)]
