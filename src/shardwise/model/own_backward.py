"""Functions with a backward of their own (torch.autograd.Function), each kept as one operator.

torch.export looks into their forward, and so forgets the backward that they were written for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction  # what every Function's apply calls
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from shardwise.errors import CaptureError

NAMESPACE = "shardwise_functions"

_library = torch.library.Library(NAMESPACE, "DEF")
_capturing: set[int] = set()  # threads
_lock = threading.Lock()
_known: dict[Any, Any] = {}  # operators, by the function and what it was given beside tensors
_count = 0


class _Place:
    """Where a tensor stands among the arguments of a call."""


@contextmanager
def kept_whole() -> Iterator[None]:
    """Within, what this thread calls becomes operators of their own."""
    with _lock:
        _capturing.add(threading.get_ident())
        _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _lock:
            _capturing.discard(threading.get_ident())
            if not _capturing:
                delattr(_SingleLevelFunction, "apply")


def _apply(kind: Any, *args: Any) -> Any:
    if threading.get_ident() not in _capturing:
        return _call(kind, args)
    if kind is CheckpointFunction:  # its backward is that of what it runs
        function, _, *given = args
        return function(*given)
    if kind.__module__.startswith("torch."):
        return _call(kind, args)
    return _operator(kind, args)([x for x in args if isinstance(x, torch.Tensor)])


def _call(kind: Any, args: tuple[Any, ...]) -> Any:
    own: Any = super(_SingleLevelFunction, kind)  # torch's, whatever is in its place
    return own.apply(*args)


def _operator(kind: Any, args: tuple[Any, ...]) -> Any:
    """The operator that calls this function with these arguments, whatever the tensors are."""
    fixed = tuple(_Place if isinstance(x, torch.Tensor) else _checked(kind, x) for x in args)
    returns, draws = _tried(kind, args)
    key = kind, fixed, tuple(map(type, fixed)), returns, draws  # 1 is not 1.0, nor True
    try:
        known = _known.get(key)
    except TypeError:  # something that cannot be looked up
        return _defined(kind, fixed, returns, draws)
    if known is None:
        known = _known[key] = _defined(kind, fixed, returns, draws)
    return known


def _checked(kind: Any, value: Any) -> Any:
    leaves = pytree.tree_leaves(value)
    if any(isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat)) for x in leaves):
        raise CaptureError(
            f"the autograd function {kind.__name__!r} is given {type(value).__name__} arguments "
            "that hold tensors or depend on the batch size; give it tensors and plain numbers"
        )
    return value


def _tried(kind: Any, args: tuple[Any, ...]) -> tuple[str, bool]:
    """What the function returns, and whether it draws random numbers."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    before = [x._version for x in tensors]
    with disable_proxy_modes_tracing(), _Watch() as watch:
        results = _call(kind, args)
    if before != [x._version for x in tensors]:
        raise CaptureError(
            f"the autograd function {kind.__name__!r} writes into its inputs; let it return its "
            "results"
        )
    several = isinstance(results, tuple)
    if not all(isinstance(y, torch.Tensor) for y in (results if several else (results,))):
        raise CaptureError(
            f"the autograd function {kind.__name__!r} returns something that is not a tensor"
        )
    return (f"({', '.join(['Tensor'] * len(results))})" if several else "Tensor"), watch.draws


class _Watch(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _defined(kind: Any, fixed: tuple[Any, ...], returns: str, draws: bool) -> Any:
    """A new operator of torch, which runs as the function does, backward included."""
    global _count
    _count += 1
    name, overload = f"function_{kind.__name__.strip('_')}", f"number_{_count}"

    def run(tensors: list[torch.Tensor]) -> Any:
        given = iter(tensors)
        return _call(kind, tuple(next(given) if x is _Place else x for x in fixed))

    tags = (torch.Tag.nondeterministic_seeded,) if draws else ()
    _library.define(f"{name}.{overload}(Tensor[] tensors) -> {returns}", tags=tags)
    _library.impl(f"{name}.{overload}", run, "CompositeImplicitAutograd")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload)
