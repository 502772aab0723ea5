"""What modules hold beside tensors: forward may read it, so that changes ask for a new capture."""

from __future__ import annotations

import argparse
import copy
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

INTERNAL = frozenset(nn.Module().__dict__) | {"_shardwise", "_is_full_backward_hook"}
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
# Modules of torch that do something else in another mode, beyond what layers follow as they run.
BRANCHING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.RReLU)
BRANCHING += (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RNNBase)
MISSING = "(deleted)"

Reads = Mapping[str, set[str]]  # names of attributes, by the path of their module


@dataclass(frozen=True)
class Looks:
    """How modules differ from those that were made parallel: what a graph was captured with."""

    others: tuple[str, ...] = ()  # modules in another mode than the model
    tokens: tuple[Any, ...] = ()  # of changes: path, name, and what tells the value from others
    changes: tuple[tuple[str, str, Any], ...] = field(default=(), compare=False)

    def apply(self, model: nn.Module) -> None:
        """Makes the same changes in another copy of the model."""
        for path, name, value in self.changes:
            own = model.get_submodule(path).__dict__
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = value


class Attributes:
    """The attributes of a parallel model's modules, compared with those it began with.

    It does not keep the model itself alive.
    """

    def __init__(self, modules: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> None:
        children = {path: module for path, module in modules.items() if path}
        self._root = modules[""]  # a weak reference
        self._paths, self._dicts = [*children], [m.__dict__ for m in children.values()]
        self._modes = [(path, own) for path, own in children.items() if _may_branch(own)]
        self.base = base or {
            path: {name: (token(value), value) for name, value in own.items()}
            for path, own in self._tables()
        }
        self._note()

    def looks(self, reads: Reads) -> Looks:
        """How modules differ now in what forward reads."""
        if self._are_other():
            self._note()
        training = self._root.training
        others = tuple(path for path, module in self._modes if module.training != training)
        if not others and not self._changes:
            return Looks()
        read = [c for c in self._changes if c[1] in reads.get(c[0], ())]
        return Looks(others, tuple((p, n, token(value)) for p, n, value in read), tuple(read))

    def _tables(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield "", {k: v for k, v in self._root.__dict__.items() if k not in INTERNAL}
        yield from zip(self._paths, self._dicts, strict=True)

    def _are_other(self) -> bool:
        try:
            own = {k: v for k, v in self._root.__dict__.items() if k not in INTERNAL}
            return bool(
                own != self._own
                or self._dicts != self._seen
                or any(tensor._version != version for tensor, version in self._tensors)
            )
        except Exception:  # arrays, say, have no truth value
            return True

    def _note(self) -> None:
        """Takes down what is there now, and how it differs from the beginning."""
        tables = dict(self._tables())
        self._own, self._seen = _copied(tables[""]), [_copied(own) for own in self._dicts]
        self._tensors = [
            (value, value._version)
            for own in tables.values()
            for value in own.values()
            if isinstance(value, torch.Tensor)
        ]
        self._changes: list[tuple[str, str, Any]] = []
        for path, own in tables.items():
            base = self.base.get(path, {})
            for name in own.keys() | base.keys():
                now = own.get(name, MISSING)
                if name not in INTERNAL and token(now) != base.get(name, NOTHING)[0]:
                    self._changes.append((path, name, now))
        self._changes.sort(key=lambda change: change[:2])


def _may_branch(module: nn.Module) -> bool:
    """Whether forward may do something else in another mode, beyond what layers do as they run."""
    if isinstance(module, BRANCHING):
        return True
    if type(module).forward in (kind.forward for kind in _run_time_kinds()):
        return False
    return not type(module).__module__.startswith("torch.nn.modules.")


@cache
def _run_time_kinds() -> tuple[type[nn.Module], ...]:
    names = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "BatchNorm2d")
    return tuple(getattr(nn, name) for name in names)


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if k in INTERNAL else _twin(v) for k, v in table.items()}


def _twin(value: Any) -> Any:
    """A copy of what may be changed in place, as far as it can be compared."""
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(map(_twin, value))
    if kind is dict:
        return {key: _twin(own) for key, own in value.items()}
    return copy.copy(value) if _is_record(value) else value


def _is_record(value: Any) -> bool:
    known = is_dataclass(value) or isinstance(value, (types.SimpleNamespace, argparse.Namespace))
    return known and not isinstance(value, type) and type(value).__eq__ is not object.__eq__


def _content(record: Any) -> dict[str, Any]:
    """The fields of a record, which may be slots."""
    if hasattr(record, "__dict__"):
        return vars(record)
    return {own.name: getattr(record, own.name, MISSING) for own in fields(record)}


class _Which(int):
    """The identity of an object, which means nothing to other ranks, and so is not written."""

    def __repr__(self) -> str:
        return "object"


def token(value: Any) -> Any:
    """What tells a value from others: of plain data its content, of anything else which it is."""
    kind = type(value)
    if isinstance(value, PLAIN):
        return kind.__name__, repr(value)
    if isinstance(value, torch.Tensor):
        return "tensor", _Which(id(value)), value._version
    if kind in (list, tuple):
        return kind.__name__, tuple(map(token, value))
    if kind is dict:
        return "dict", tuple((repr(key), token(own)) for key, own in value.items())
    if kind is set:
        return "set", tuple(sorted(map(repr, value)))
    if _is_record(value):
        return kind.__name__, token(_content(value))
    return kind.__name__, _Which(id(value))


NOTHING = (token(MISSING), MISSING)

# -- what forward reads ----------------------------------------------------------------------------


_noted: dict[int, set[str]] = {}  # by the identity of a module that is being captured
_lock = threading.Lock()


@contextmanager
def read_attributes(model: nn.Module) -> Iterator[dict[str, set[str]]]:
    """Within, every attribute of the model's modules that is read is noted, by their paths."""
    named = dict(model.named_modules())
    reads: dict[str, set[str]] = {path: set() for path in named}
    own = {id(module): reads[path] for path, module in named.items()}
    with _lock:
        _noted.update(own)
        nn.Module.__getattribute__ = _read  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        with _lock:
            for key in own:
                _noted.pop(key, None)
            if not _noted:
                del nn.Module.__getattribute__


def _read(self: Any, name: str) -> Any:
    own = _noted.get(id(self))
    if own is not None:
        own.add(name)
    return object.__getattribute__(self, name)
