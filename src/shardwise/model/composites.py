"""Operators that are made of others, taken apart while a model is exported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

from torch import fx
from torch.export import _trace as torch_trace
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardwise.operators.parts import is_known, table

_lock = threading.Lock()
_capturing: set[int] = set()  # threads
_make_fx = torch_trace.make_fx


@contextmanager
def taken_apart(wanted: bool = True) -> Iterator[None]:
    """Within, what this thread exports has the parts of such operators in their place."""
    if not wanted:
        yield
        return
    with _lock:
        _capturing.add(threading.get_ident())
        torch_trace.make_fx = _make
    try:
        yield
    finally:
        with _lock:
            _capturing.discard(threading.get_ident())
            if not _capturing:
                torch_trace.make_fx = _make_fx


def _make(function: Callable[..., Any], **options: Any) -> Any:
    """torch's tracer, which is told what to take apart."""
    if threading.get_ident() in _capturing:
        parts = {op: partial(_parts_of, op, made_of) for op, made_of in table().items()}
        options = {"decomposition_table": parts} | options
    return _make_fx(function, **options)


def _parts_of(op: Any, made_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call is made of; the call itself where nobody knows a part, or they cannot be had."""
    if op._schema.is_mutable:  # what it has written is not forgotten
        return made_of(*args, **kwargs)
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    before = len(graph.nodes)
    try:
        result = made_of(*args, **kwargs)
    except Exception:  # they depend on values, say
        result = NotImplemented
    parts = [*islice(reversed(graph.nodes), len(graph.nodes) - before)]
    if result is not NotImplemented and all(map(is_known, parts)):
        return result
    for part in parts:
        graph.erase_node(part)
    return NotImplemented


def without_unused_parts(graph: fx.Graph) -> fx.Graph:
    """The same graph, without what operators compute beside their results."""
    for node in reversed(graph.nodes):
        whole = node.meta.get("original_aten")
        is_part = node.op == "call_function" and whole is not None and whole is not node.target
        if is_part and not node.users and not node.is_impure():
            graph.erase_node(node)
    return graph
