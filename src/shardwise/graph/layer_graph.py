"""The layer graph: what a model computes, as frozen data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operand:
    """A tensor that a layer reads: another layer's output, a parameter, a buffer or a constant."""

    kind: Literal["value", "param", "buffer", "constant"]
    name: str
    shape: tuple[int, ...]
    scalar: bool = False  # without dimensions; counts as one element of one dimension


@dataclass(frozen=True)
class Slot:
    """The place of operand `index` in the argument list of an ATen call."""

    index: int


@dataclass(frozen=True)
class Like:
    """The place of a tensor of which an ATen call reads only the shape, type and memory order."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_permuted(self.shape, self.order, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Traits:
    """What a layer may have whatever its operator: how it is called, and what rules its mode."""

    called: str | None = None  # the ATen operator, where its call is run as it is
    written: bool = False  # into the first operand, whose type the result takes
    in_place: bool = False  # the model overwrites the first operand
    on_a_copy: bool = False  # of that operand: in place the operator has another derivative
    draws: bool = False  # random numbers
    module: str | None = None  # the path of the module whose training flag rules
    always: bool = False  # it behaves as in training, whatever the flag
    never: bool = False
    idle: bool = False  # it was captured while it did not, which is what costs are made for
    memory: tuple[int, ...] | None = None  # the order of dimensions in which numbers are drawn
    autocast: tuple[str, torch.dtype | None] | None = None  # the model's own, around this layer


TOGETHER = (  # those that a layer has or has not
    ("called", "written", "in_place", "on_a_copy"),
    ("draws",),
    ("module", "always", "never"),
    ("memory",),
    ("autocast",),
)
# What an operator keeps of its call: a frozen dataclass, or None.
Attrs = TypeVar("Attrs", covariant=True)


@dataclass(frozen=True, eq=False)
class Layer(Generic[Attrs]):
    """One operator: its operands, its attributes and the tensor it produces.

    `attrs` are what only this operator has, `traits` what layers have whatever their operator.
    `dims` labels the dimensions of the output with the letters of the grid axes that may split
    them (`c` for channels, `.` for a dimension that stays whole), e.g. "nchw". A `scalar` has no
    dimensions where the model is run as it is; between layers it is one element of one dimension,
    of which a rank may have none.
    """

    name: str
    op: str
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    dims: str
    attrs: Attrs
    traits: Traits = field(default_factory=Traits)
    present: tuple[bool, ...] = ()  # which of its operator's tensors it has
    target: str = ""  # the ATen overload, for operators that are called as they are
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    scalar: bool = False

    @cached_property
    def is_input(self) -> bool:
        """Whether this is a tensor that the user gives, and nothing is computed."""
        return self.op == "input"

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the layers this one reads."""
        return tuple(o.name for o in self.operands if o.kind == "value")

    @cached_property
    def params(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.operands if o.kind == "param")

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All attributes and those traits that it has, by name: what tells layers apart."""
        found = {"present": self.present} | (vars(self.attrs) if self.attrs is not None else {})
        for names in TOGETHER:
            if getattr(self.traits, names[0]) not in (None, False):
                found |= {name: getattr(self.traits, name) for name in names}
        return dict(sorted(found.items()))

    def call(
        self, tensors: list[Any], in_place: bool = False, device: torch.device | None = None
    ) -> Any:
        """Runs the ATen operator, or its in-place twin, with these tensors as operands.

        Scalars get back their lack of dimensions, on which the type of the result may depend.
        """
        tensors = [
            tensor.reshape(()) if operand.scalar else tensor
            for operand, tensor in zip(self.operands, tensors, strict=True)
        ]
        if self.traits.on_a_copy and not in_place:
            tensors, in_place = [tensors[0].clone(), *tensors[1:]], True
        args = fill_slots(self.args, tensors, device)
        operator = _overload(self.target, in_place)
        result = operator(*args, **fill_slots(dict(self.kwargs), tensors, device))
        if self.traits.written and result.dtype != self.dtype:
            return result.to(self.dtype)  # what is written into a tensor takes its type
        return result

    def caller(self, in_place: bool = False) -> Callable[[list[Any]], Any]:
        """`call` for many calls: what stands beside the tensors is looked at once."""
        num, traits = len(self.operands), self.traits
        first, rest = self.args[:num], self.args[num:]
        plain = first == tuple(map(Slot, range(num))) and not any(o.scalar for o in self.operands)
        others = tree_leaves((rest, dict(self.kwargs)))
        if not plain or traits.on_a_copy or traits.written or _has_slots(others):
            return partial(self.call, in_place=in_place)
        operator, options = _overload(self.target, in_place), dict(self.kwargs)
        if not rest and not options:
            return lambda tensors: operator(*tensors)
        return lambda tensors: operator(*tensors, *rest, **options)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        called = self.traits.called or self.op
        return f"{self.name}: {called}({', '.join(self.inputs)}) -> {shape}"


def _has_slots(leaves: Iterable[Any]) -> bool:
    return any(isinstance(leaf, (Slot, Like)) for leaf in leaves)


@cache
def _overload(target: str, in_place: bool) -> Any:
    """The operator of a name such as "aten.relu.default"."""
    namespace, name, overload = target.split(".")
    name += "_" if in_place else ""
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def fill_slots(template: Any, tensors: list[Any], device: torch.device | None = None) -> Any:
    """The template with every Slot replaced by its tensor, and every Like by an empty one."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, Like):
        return template.empty(device or torch.device("cpu"))
    if isinstance(template, (list, tuple)):
        filled = [fill_slots(item, tensors, device) for item in template]
        return tuple(filled) if isinstance(template, tuple) else filled
    if isinstance(template, dict):
        return {key: fill_slots(item, tensors, device) for key, item in template.items()}
    return template


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """Layers in the order in which they can run, for inputs of one size.

    `outputs` names the layers whose tensors the model returns; `output_spec` is the structure that
    its forward returns them in (a tuple, a dict, ...), `numbers` what is no tensor there, by place.
    `left` is what forward leaves in attributes of its modules.
    """

    layers: tuple[Layer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int
    training: bool
    output_spec: Any = field(repr=False, default=None)
    numbers: Mapping[int, Any] = field(repr=False, default_factory=dict)
    constants: Mapping[str, Any] = field(repr=False, default_factory=dict)
    left: Mapping[Any, Any] = field(repr=False, default_factory=dict)
    origin: Any = field(repr=False, default=None)  # what it was captured from, for who needs more

    @cached_property
    def by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def __getitem__(self, name: str) -> Layer:
        return self.by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    @cached_property
    def params(self) -> frozenset[str]:
        """The names of all parameters that any layer reads."""
        return frozenset(name for layer in self.layers for name in layer.params)

    @cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """Who reads each layer's output."""
        readers: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for layer in self.layers:
            for name in dict.fromkeys(layer.inputs):
                readers[name].append(layer.name)
        return {name: tuple(names) for name, names in readers.items()}

    @cached_property
    def signature(self) -> str:
        """A digest of the network without the sizes of its inputs and the values of its weights."""
        digest = hashlib.sha256()
        for layer in self.layers:
            stored = [(o.kind, o.name, o.shape) for o in layer.operands if o.kind != "value"]
            # Other layers may be told sizes: where a slice begins, how much is padded.
            facts = [(k, v) for k, v in layer.facts.items() if k != "memory"] if stored else []
            called = layer.traits.called
            digest.update(
                repr((layer.name, layer.op, called, layer.inputs, stored, facts)).encode()
            )
        return digest.hexdigest()[:16]

    @cached_property
    def depends_on_memory(self) -> bool:
        """Whether numbers are drawn in an order that follows how inputs lie in memory."""
        leaves = [leaf for x in self.layers for leaf in tree_leaves((x.args, dict(x.kwargs)))]
        drawn = any(layer.traits.memory is not None for layer in self.layers)
        return drawn or any(isinstance(leaf, Like) for leaf in leaves)

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))
