"""What a graph was captured from: the same model need not be captured again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from inspect import isfunction
from types import CodeType
from typing import Any
from weakref import ref

import torch
from torch import nn

from shardwise.model.attribute_values import token
from shardwise.model.attributes import INTERNAL
from shardwise.model.hooks import HOOKS
from shardwise.modules import named_tensors


class Fingerprint:
    """All that a capture may depend on: modules, what they and their classes hold, and tensors."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.modules = {path: ref(module) for path, module in modules.items()}
        self.defaults = torch.get_default_dtype(), torch.get_default_device()
        tables = [(path, vars(module)) for path, module in modules.items()]
        own = [item for item in _items(tables) if item[1] not in INTERNAL]
        hooks = [(path, {name: table[name] for name in HOOKS}) for path, table in tables]
        kinds = dict.fromkeys(kind for m in modules.values() for kind in type(m).__mro__)
        held = [value for *_, value in own if isfunction(value)]
        outside = [*_written(kinds), *_outside(held, set())]
        # Values are kept beside their tokens, so that no other object gets their place in memory.
        self.values = [*own, *_items(hooks), *_items(outside)]
        first: dict[int, str] = {}
        self.tensors = [
            (name, first.setdefault(id(x), name), type(x), x.requires_grad, _lies(x))
            for name, x in named_tensors(model)
        ]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and self.modules == other.modules
            and self.defaults == other.defaults
            and [value[:3] for value in self.values] == [value[:3] for value in other.values]
            and self.tensors == other.tensors
        )

    __hash__ = None  # type: ignore[assignment]


def _lies(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _items(tables: Iterable[tuple[Any, Mapping[str, Any]]]) -> Iterator[tuple[Any, str, Any, Any]]:
    for of, table in tables:
        for name, value in table.items():
            yield of, name, token(value), value


def _written(kinds: Iterable[type]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """What classes that are not torch's hold, and what their functions read from outside."""
    seen: set[int] = set()
    for kind in kinds:
        if not _is_torchs(kind):
            yield kind, vars(kind)
            yield from _outside(filter(isfunction, vars(kind).values()), seen)


def _outside(functions: Iterable[Any], seen: set[int]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Globals and variables around functions, and around those that these call."""
    for function in functions:
        if id(function) in seen or _is_torchs(function):
            continue
        seen.add(id(function))
        names = sorted(function.__globals__.keys() & set(_names(function.__code__)))
        found = {name: function.__globals__[name] for name in names}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found |= {f"{name} around": cell.cell_contents for name, cell in cells}
        yield function, found
        yield from _outside(filter(isfunction, found.values()), seen)


def _names(code: CodeType) -> Iterator[str]:
    """What a function reads by name, the functions inside it included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_torchs(value: Any) -> bool:
    return value.__module__ is None or value.__module__.startswith(("torch.", "builtins"))


def fingerprint_of(model: nn.Module) -> Fingerprint | None:
    """What a model is captured from; None where that cannot be said."""
    try:
        return Fingerprint(model)
    except Exception:
        return None


class Origin:
    """The captures of a model, for other sizes of inputs too, and its fingerprint.

    A parallel model takes them over, once, if they are of the model that it is made of.
    """

    def __init__(
        self,
        graphs: Any,  # from (training, sizes) to the layer graph
        seen: Fingerprint | None = None,
        shapes: tuple[tuple[int, ...], ...] = (),
        dtypes: tuple[torch.dtype, ...] = (),
    ) -> None:
        self.graphs = graphs
        self._held = (graphs, seen) if seen is not None else None
        self._inputs = shapes, dtypes
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Elsewhere, and for a copy of the model, there are none."""
        return type(None), ()

    def take(
        self,
        model: nn.Module,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[torch.dtype | None, ...],
    ) -> Any:
        """The captures, if they are of this very model as it is now, and nobody has them."""
        with self._lock:
            held, self._held = self._held, None
        usual = next(model.parameters(), torch.empty(0)).dtype  # of inputs that have no other
        asked = shapes, tuple(dtype or usual for dtype in dtypes)
        if held is None or asked != self._inputs or fingerprint_of(model) != held[1]:
            return None
        return held[0]
