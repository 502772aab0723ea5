"""What forward reads meanwhile: attributes of modules, and of objects that they hold."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwise.model.attribute_values import EVERYTHING, inside, is_object

_lock = threading.Lock()
_set = nn.Module.__setattr__
_noted: dict[int, set[str]] = {}  # names that are read, by the module that is being captured
_written: dict[int, set[str]] = {}  # names that were set before, of which nobody reads the old
# By the class of objects: names for everyone who captures, and what the class had itself.
_patched: dict[type, tuple[list[set[str]], Any]] = {}


@contextmanager
def read_attributes(model: nn.Module) -> Iterator[dict[Any, set[str]]]:
    """Within, every attribute of the model's modules that is read is noted, by their paths.

    What forward itself has set before is not what it depends on. Attributes of other objects that
    modules hold are noted by their classes.
    """
    named = dict(model.named_modules())
    reads: dict[Any, set[str]] = defaultdict(set, {path: set() for path in named})
    own = {id(module): reads[path] for path, module in named.items()}
    held = [value for module in named.values() for value in vars(module).values()]
    kinds = {type(value) for value in inside(held) if is_object(value)}
    with _lock:
        _noted.update(own)
        _written.update((key, set()) for key in own)
        nn.Module.__getattribute__ = _read  # type: ignore[method-assign]
        nn.Module.__setattr__ = _write  # type: ignore[method-assign]
        watched = [kind for kind in kinds if _watch(kind, reads[kind])]
    try:
        yield reads
    finally:
        with _lock:
            for key in own:
                _noted.pop(key, None)
                _written.pop(key, None)
            if not _noted:
                del nn.Module.__getattribute__
                nn.Module.__setattr__ = _set  # type: ignore[method-assign]
            for kind in watched:
                _leave(kind, reads[kind])


def _read(self: Any, name: str) -> Any:
    own = _noted.get(id(self))
    if own is not None and name not in _written[id(self)]:
        own.add(name)
    return object.__getattribute__(self, name)


def _write(self: Any, name: str, value: Any) -> None:
    own = _written.get(id(self))
    if own is not None:
        own.add(name)
    _set(self, name, value)


def _watch(kind: Any, names: set[str]) -> bool:
    """From now on names that are read of objects of this class are noted, if it allows that."""
    if kind in _patched:
        _patched[kind][0].append(names)
        return True
    original, takers = kind.__getattribute__, [names]

    def read(self: Any, name: str) -> Any:
        for taker in takers:
            taker.add(name)
        return original(self, name)

    before = vars(kind).get("__getattribute__")
    try:
        kind.__getattribute__ = read
    except TypeError:  # of a class that is not written in Python
        names.add(EVERYTHING)
        return False
    _patched[kind] = takers, before
    return True


def _leave(kind: Any, names: set[str]) -> None:
    takers, before = _patched[kind]
    takers[:] = [taker for taker in takers if taker is not names]
    if takers:
        return
    del _patched[kind]
    if before is None:
        del kind.__getattribute__
    else:
        kind.__getattribute__ = before
