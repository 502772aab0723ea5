"""The layer graph: what a model computes, as frozen data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Operand:
    """A tensor that a layer reads: another layer's output, a parameter, a buffer or a constant."""

    kind: Literal["value", "param", "buffer", "constant"]
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """The place of operand `index` in the argument list of an ATen call."""

    index: int


@dataclass(frozen=True, eq=False)
class Layer:
    """One operator: its operands, its attributes and the tensor it produces.

    `dims` labels the dimensions of the output with the letters of the grid axes that may split
    them (`c` for channels, `.` for a dimension that stays whole), e.g. "nchw".
    """

    name: str
    op: str
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    dims: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""  # the ATen overload, for operators that are called as they are
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the layers this one reads."""
        return tuple(o.name for o in self.operands if o.kind == "value")

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.operands if o.kind == "param")

    def call(self, tensors: list[Any], in_place: bool = False) -> Any:
        """Runs the ATen operator, or its in-place twin, with these tensors as operands."""
        args = fill_slots(self.args, tensors)
        operator = _overload(self.target, in_place)
        return operator(*args, **fill_slots(dict(self.kwargs), tensors))

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        called = self.attrs.get("called", self.op)
        return f"{self.name}: {called}({', '.join(self.inputs)}) -> {shape}"


@cache
def _overload(target: str, in_place: bool) -> Any:
    """The operator of a name such as "aten.relu.default"."""
    namespace, name, overload = target.split(".")
    name += "_" if in_place else ""
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def fill_slots(template: Any, tensors: list[Any]) -> Any:
    """The template with every Slot replaced by its tensor."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, (list, tuple)):
        filled = [fill_slots(item, tensors) for item in template]
        return tuple(filled) if isinstance(template, tuple) else filled
    if isinstance(template, dict):
        return {key: fill_slots(item, tensors) for key, item in template.items()}
    return template


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """Layers in the order in which they can run, for one batch size.

    `outputs` names the layers whose tensors the model returns; `output_spec` is the structure that
    its forward returns them in (a tuple, a dict, ...).
    """

    layers: tuple[Layer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int
    training: bool
    output_spec: Any = field(repr=False, default=None)
    constants: Mapping[str, Any] = field(repr=False, default_factory=dict)
    batch_is_free: bool = True

    @cached_property
    def by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def __getitem__(self, name: str) -> Layer:
        return self.by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

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
        """A digest of the network without its batch size and weights."""
        digest = hashlib.sha256()
        for layer in self.layers:
            shape = layer.shape[1:] if layer.dims.startswith("n") else layer.shape
            operands = [(o.kind, o.name) for o in layer.operands]
            attrs = sorted(layer.attrs.items())
            digest.update(repr((layer.name, layer.op, shape, operands, attrs)).encode())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))
