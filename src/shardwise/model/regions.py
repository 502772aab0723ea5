"""Regions of an exported forward pass: `with torch.no_grad()`, or `with torch.autocast(...)`.

torch.export makes a graph of its own of each. Here they become part of the whole again: what was
computed without gradients is detached where something with gradients uses it, and what runs under
another torch.autocast than the rest is marked with it (`autocast_of`).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx

from shardwise.errors import CaptureError
from shardwise.operators.calls import is_in_place

aten = torch.ops.aten
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
Autocast = tuple[str, torch.dtype | None]  # a kind of device, and what it lowers to there


def autocast_of(node: fx.Node) -> Autocast | None:
    """The torch.autocast of the model's own that a call stands in."""
    return node.meta.get("autocast_region")


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """Within, whoever enters torch.inference_mode on this thread is refused: export ignores it."""
    mode, capturing = torch.inference_mode, threading.get_ident()
    enter = mode.__enter__

    def refuse(self: Any) -> Any:
        if self.mode and threading.get_ident() == capturing:
            raise CaptureError(
                "the model uses torch.inference_mode in its forward pass; use torch.no_grad there"
            )
        return enter(self)

    mode.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        mode.__enter__ = enter  # type: ignore[method-assign]


def joined(module: fx.GraphModule) -> fx.Graph:
    """The graph of an exported module, with all regions in their place."""
    if not any(_is_region(node) for node in module.graph.nodes):
        return module.graph
    return _Joined().of(module)


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and any(
        node.target is getattr(torch.ops.higher_order, name)
        for name in ("wrap_with_set_grad_enabled", "wrap_with_autocast")
    )


def _parts(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The results of a region, of which this node is one."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    found = values.get(source)
    return found if isinstance(found, tuple) else None


class _Joined:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.detached: dict[fx.Node, fx.Node] = {}
        self.without: set[fx.Node] = set()  # nodes that were computed without gradients
        self.memory: dict[int, bool] = {}  # whether it was made with gradients
        self.autocast: Autocast | None = None  # of the region that is being copied

    def of(self, module: fx.GraphModule) -> fx.Graph:
        values: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._copied(node, {}, True)
        results = self._inlined(module, values, True)
        self.graph.output(results)
        return self.graph

    def _inlined(self, module: Any, values: dict[fx.Node, Any], gradients: bool) -> Any:
        """Copies what a module does; returns what it returns."""
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: self._used(values[n], gradients))
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
            elif node.op == "placeholder":
                pass
            elif _is_region(node):
                values[node] = self._region(node, values, gradients)
            elif (parts := _parts(node, values)) is not None:
                values[node] = parts[node.args[1]]
            else:
                values[node] = self._copied(node, values, gradients)
        raise AssertionError("an exported graph returns something")

    def _region(
        self, node: fx.Node, values: dict[fx.Node, Any], gradients: bool
    ) -> tuple[Any, ...]:
        outside = self.autocast
        if node.target is _GRAD:
            gradients, body, *args = cast(Any, node.args)
        else:
            kind, dtype, enabled, _, body, *args = cast(Any, node.args)
            self.autocast = kind, (dtype or torch.get_autocast_dtype(kind)) if enabled else None
        inner = values[body]
        names = [n for n in inner.graph.nodes if n.op == "placeholder"]
        given = {n: values[a] for n, a in zip(names, args, strict=True)}
        results = self._inlined(inner, given, bool(gradients))
        self.autocast = outside
        return tuple(results)

    def _copied(self, node: fx.Node, values: dict[fx.Node, Any], gradients: bool) -> fx.Node:
        if not gradients:
            self._check_write(node, values)
        copied = self.graph.node_copy(node, lambda n: self._used(values[n], gradients))
        copied.name = node.name  # by which the program's signature knows it
        if self.autocast is not None:
            copied.meta["autocast_region"] = self.autocast
        part = node.target is operator.getitem and copied.args[0] in self.without
        if not gradients or part:
            self.without.add(copied)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self.memory.setdefault(value.untyped_storage()._cdata, gradients)
        return copied

    def _used(self, value: Any, gradients: bool) -> Any:
        """What a value is to somebody who computes with gradients, or without."""
        is_tensor = isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
        if not gradients or not is_tensor or value not in self.without:
            return value
        if value not in self.detached:
            node = self.graph.call_function(aten.detach.default, (value,))
            node.meta = dict(value.meta)
            self.detached[value] = node
        return self.detached[value]

    def _check_write(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """What is written without gradients into a tensor that may have some cannot be followed."""
        if node.op != "call_function" or not is_in_place(node) or not node.args:
            return
        target = values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        if isinstance(target, fx.Node) and target.op != "placeholder":
            memory = target.meta["val"].untyped_storage()._cdata
            if self.memory.get(memory, False):
                raise CaptureError(
                    f"the model writes in place ({node.target}) under torch.no_grad() into a "
                    "tensor that was computed with gradients; use operators that are not in place"
                )
