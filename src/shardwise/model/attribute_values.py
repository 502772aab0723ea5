"""Values that modules hold beside tensors: what tells them apart, and copies to compare with."""

from __future__ import annotations

import argparse
import copy
import sys
import types
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError


class LeftBehind:
    """Stands where forward leaves a tensor on one device; whoever uses it is told so."""

    def __init__(self, name: str, where: str) -> None:
        self.__dict__["_why"] = (
            f"forward leaves tensors, or what depends on the batch, in {name!r} of {where}, where "
            "a parallel model does not keep them; let it return them"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ShardwiseError(self._why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, which takes no for an answer
            raise AttributeError(name)
        raise ShardwiseError(self.__dict__["_why"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = pytree.tree_leaves([args, kwargs])
        raise ShardwiseError(next(value for value in held if isinstance(value, LeftBehind))._why)

    def __deepcopy__(self, memo: Any) -> LeftBehind:
        return self

    def __repr__(self) -> str:
        return f"({self._why})"


USES = """
    add radd sub rsub mul rmul truediv rtruediv floordiv mod pow neg abs matmul lt le gt ge
    len iter getitem setitem contains bool float int call setattr
"""
for _name in USES.split():
    setattr(LeftBehind, f"__{_name}__", LeftBehind._refuse)

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
SEQUENCES, SETS = (list, tuple), (set, frozenset)
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
# Modules whose objects are nobody's settings.
FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "shardwise"}
EVERYTHING = "__dict__"  # a name that stands for all of an object's
MOST_VISITED = 10_000  # values that are looked at for what they hold
MISSING = "(deleted)"

# Names of attributes that forward reads: of a module by its path, of other objects by their class.
Reads = Mapping[Any, set[str]]


def is_object(value: Any) -> bool:
    """Whether a value is an object of settings, say: of a class of the user's, with attributes."""
    kind = type(value)
    if isinstance(value, NAMESPACES):
        return True
    if isinstance(value, (*PLAIN, *SEQUENCES, *SETS, dict, nn.Module, torch.Tensor, type)):
        return False
    if kind.__module__.partition(".")[0] in FOREIGN or callable(getattr(kind, "__get__", None)):
        return False
    return _table(value) is not None or is_dataclass(value)


def is_data(value: Any) -> bool:
    """Whether a value is what it holds, so that a copy is as good."""
    known = (*PLAIN, *SEQUENCES, *SETS, dict, np.ndarray, LeftBehind)
    return isinstance(value, known) or is_object(value)


def _table(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, which are not read by asking it: that may be noted."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def attributes_of(value: Any, names: set[str] | None = None) -> dict[str, Any]:
    """The attributes of an object, which may be slots; those of these names, or all."""
    own = _table(value)
    if own is None:
        slots = [field.name for field in fields(value)]
        own = {name: object.__getattribute__(value, name) for name in slots}
    if names is None or EVERYTHING in names:
        return dict(own)
    return {name: own[name] for name in own if name in names}


def inside(value: Any) -> list[Any]:
    """A value and everything that it holds, each once."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo and len(seen) < MOST_VISITED:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (*SEQUENCES, *SETS)):
            todo += value
        elif is_object(value):
            todo += attributes_of(value).values()
    return list(seen.values())


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of data; copy.deepcopy fails on dictionaries whose items are attributes, too."""
    kind: Any = type(value)
    if isinstance(value, (*PLAIN, LeftBehind)):
        return value
    if isinstance(value, (*SETS, np.ndarray)):
        return copy.copy(value)
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        made = tuple.__new__(kind, [copied(own, memo) for own in value])
    elif isinstance(value, dict):
        made = memo[id(value)] = kind.__new__(kind)
        put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        for key, own in dict.items(value):
            put(made, key, copied(own, memo))
    elif isinstance(value, SEQUENCES):
        made = memo[id(value)] = kind.__new__(kind)
        list.extend(made, [copied(own, memo) for own in value])
    else:
        made = memo[id(value)] = kind.__new__(kind)
    own = attributes_of(value) if is_object(value) else _table(value) or {}  # of containers, too
    for name, held in own.items():
        object.__setattr__(made, name, copied(held, memo))
    return made


class _Which(int):
    """The identity of an object, which means nothing to other ranks, and so is not written."""

    def __repr__(self) -> str:
        return "object"


class _Object(NamedTuple):
    """What tells an object from others, of which forward may read a part only."""

    kind: type
    which: _Which
    attributes: tuple[tuple[str, Any], ...]

    def as_read(self, reads: Reads) -> Any:
        if self.kind not in reads:
            return self.kind.__name__, self.which
        names = reads[self.kind]
        every = EVERYTHING in names
        read = ((name, own) for name, own in self.attributes if every or name in names)
        return self.kind.__name__, tuple((name, as_read(own, reads)) for name, own in read)


def as_read(made: Any, reads: Reads) -> Any:
    """A token of what forward reads of a value, made of that of the whole value."""
    if isinstance(made, _Object):
        return made.as_read(reads)
    return tuple(as_read(own, reads) for own in made) if type(made) is tuple else made


def token(value: Any, within: tuple[int, ...] = ()) -> Any:
    """What tells a value from others: of plain data its content, of anything else which it is."""
    kind = type(value)
    if isinstance(value, PLAIN):
        return kind.__name__, repr(value)
    if isinstance(value, LeftBehind):
        return "lost", repr(value)
    if isinstance(value, nn.Parameter):  # of which its values are no news
        return "parameter", _Which(id(value))
    if isinstance(value, torch.Tensor):
        return "tensor", _Which(id(value)), value._version
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return "array", str(value.dtype), value.shape, zlib.crc32(value.tobytes())
    if id(value) in within:  # it holds itself
        return "again", within.index(id(value))
    within = (*within, id(value))
    if isinstance(value, SEQUENCES):
        return kind.__name__, tuple(token(own, within) for own in value)
    if isinstance(value, dict):
        pairs = ((repr(key), token(own, within)) for key, own in value.items())
        return kind.__name__, tuple(pairs)
    if isinstance(value, SETS):
        return kind.__name__, tuple(sorted(map(repr, value)))
    which = _Which(id(value))
    if not is_object(value):
        return kind.__name__, which
    own = attributes_of(value).items()
    return _Object(kind, which, tuple((name, token(held, within)) for name, held in own))


class HeldValues:
    """What an object held in attributes that forward reads; it equals an object that holds it."""

    def __init__(self, value: Any, reads: Reads, within: tuple[int, ...]) -> None:
        self._kind, self._names = type(value), set(reads[type(value)])
        own = attributes_of(value, self._names)
        self._content = {name: twin(held, reads, within) for name, held in own.items()}

    def __eq__(self, other: object) -> bool:
        return type(other) is self._kind and attributes_of(other, self._names) == self._content

    __hash__ = None  # type: ignore[assignment]


def twin(value: Any, reads: Reads, within: tuple[int, ...] = ()) -> Any:
    """A copy of what may be changed in place, as far as it can be compared."""
    if id(value) in within:
        return value
    within = (*within, id(value))
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(twin(own, reads, within) for own in value)
    if isinstance(value, dict):
        return {key: twin(own, reads, within) for key, own in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    if kind in reads and is_object(value):
        return HeldValues(value, reads, within)
    return value
