"""The layer graphs of a model, captured when they are first needed for inputs of such types."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.errors import CaptureError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.attribute_values import copied, inside, is_data, token
from shardwise.model.attribute_writes import changes
from shardwise.model.attributes import INTERNAL, Looks
from shardwise.model.origin import Origin, fingerprint_of
from shardwise.model.torch_export import Captured, check_example
from shardwise.model.weightless import weightless
from shardwise.modules import assign, copy_structure, named_tensors
from shardwise.tensors import memory_order

Graphs = Callable[[bool, int], LayerGraph]  # from (training, batch) to the layer graph


def capture(model: nn.Module, *inputs: torch.Tensor) -> LayerGraph:
    """The layer graph of a model in training mode, for inputs of these shapes.

    >>> graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(2, 3, 8, 8))
    >>> print(graph)
    input: input() -> 2x3x8x8
    0: conv(input) -> 2x8x6x6
    1: relu(0) -> 2x8x6x6
    """
    check_example(model, inputs)
    home = next((param.device for param in model.parameters()), torch.device("cpu"))
    if not all(x.is_contiguous() and x.device == home and not x.is_meta for x in inputs):
        return Captured(model, inputs, training=True).graph(inputs[0].shape[0])
    shapes, dtypes = (tuple(tuple(x.shape) for x in inputs), tuple(x.dtype for x in inputs))
    graphs, seen = ModelGraphs(model, shapes, dtypes), fingerprint_of(model)
    graph = graphs(True, shapes[0][0])
    return replace(graph, origin=Origin(graphs, seen, shapes, dtypes))


MOST_CAPTURED = 4  # that are kept: modes, and types of inputs and parameters
UNCHANGED = Looks()


@dataclass(frozen=True)
class Kinds:
    """On what the types of a model's values depend: what it is given, and what it holds.

    Random numbers depend on how inputs lie in memory, too.
    """

    inputs: tuple[torch.dtype, ...]
    stored: tuple[torch.dtype, ...]
    orders: tuple[tuple[int, ...], ...]  # of the inputs' dimensions in memory
    autocast: torch.dtype | None = None  # what torch.autocast around the model lowers to

    @classmethod
    def of(
        cls,
        inputs: tuple[torch.Tensor, ...],
        stored: Mapping[str, torch.Tensor],
        autocast: torch.dtype | None = None,
    ) -> Kinds:
        """Those of a pass that is about to begin."""
        types = tuple(x.dtype for x in inputs), tuple(x.dtype for x in stored.values())
        return cls(*types, tuple(map(memory_order, inputs)), autocast)

    @property
    def in_order(self) -> Kinds:
        """The same for inputs that lie in memory as their dimensions follow each other."""
        return replace(self, orders=tuple(tuple(range(len(order))) for order in self.orders))


class ModelGraphs:
    """Captures a model in each mode when it is first needed, without keeping its weights.

    What it is given and holds may change its types later: then it is captured again.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[torch.dtype | None, ...] = (),
    ) -> None:
        self._model = copy_structure(model)
        _own_objects(self._model)
        twins: dict[int, torch.Tensor] = {}  # by the tensor they stand for, so that ties stay
        for name, tensor in list(named_tensors(self._model)):
            if id(tensor) not in twins:
                twins[id(tensor)] = weightless(tensor)
            assign(self._model, name, twins[id(tensor)])
        like = next(self._model.parameters(), torch.empty(0))
        types = [dtype or like.dtype for dtype in (*dtypes, *[None] * len(shapes))]
        self._inputs = tuple(
            torch.empty(shape, dtype=dtype, device=like.device)
            for shape, dtype in zip(shapes, types, strict=False)
        )
        self._kinds = Kinds.of(self._inputs, dict(self._model.named_parameters()))
        self._looks = UNCHANGED
        self._captured: dict[tuple[bool, Kinds, Looks], Captured] = {}  # the last used is last
        self.reads: dict[Any, set[str]] = {}  # attributes that forward reads, see `Reads`
        self._lock = threading.RLock()  # a loader asks beside the pass that runs

    def __call__(self, training: bool, batch: int) -> LayerGraph:
        """The graph for inputs and parameters as they were last."""
        with self._lock:
            return self._of(training).graph(batch)

    def typed(
        self, training: bool, batch: int, kinds: Kinds, looks: Looks = UNCHANGED
    ) -> LayerGraph:
        """The graph where inputs and parameters are of these types, and modules look like this."""
        with self._lock:
            self._looks = looks
            self._retype(kinds.in_order)
            graph = self._of(training).graph(batch)
            if kinds.orders != self._kinds.orders and graph.depends_on_memory:
                self._retype(kinds)
                graph = self._of(training).graph(batch)
            return graph

    def _retype(self, kinds: Kinds) -> None:
        """Inputs and parameters become of these types."""
        if kinds == self._kinds:
            return
        given = zip(self._inputs, kinds.inputs, kinds.orders, strict=True)
        self._inputs = tuple(
            torch.empty_permuted(x.shape, order, dtype=dtype, device=x.device)
            for x, dtype, order in given
        )
        named = list(self._model.named_parameters())
        for (_, param), dtype in zip(named, kinds.stored, strict=True):
            if param.dtype != dtype:
                self._change(param, dtype)
        self._kinds = kinds

    def _change(self, param: torch.Tensor, dtype: torch.dtype) -> None:
        """A parameter, and buffers of what was its type, change theirs as `Module.to` does it."""
        twin = weightless(param, dtype)
        for other, tensor in list(named_tensors(self._model)):
            if tensor is param:
                assign(self._model, other, twin)
            elif not isinstance(tensor, nn.Parameter) and tensor.dtype == param.dtype:
                assign(self._model, other, tensor.to(dtype))

    def _of(self, training: bool) -> Captured:
        key = training, self._kinds, self._looks
        captured = self._captured.pop(key, None)
        if captured is None:
            model = copy_structure(self._model) if self._looks.changes else self._model
            self._looks.apply(model)
            settings = {"others": self._looks.others, "autocast": self._kinds.autocast}
            captured = Captured(model, self._inputs, training, **settings)
            self._check_left(captured)
            for path, names in captured.reads.items():
                self.reads.setdefault(path, set()).update(names)
        self._captured[key] = captured
        while len(self._captured) > MOST_CAPTURED:
            del self._captured[next(iter(self._captured))]
        return captured

    def _check_left(self, captured: Captured) -> None:
        """Refuses a model that goes on from what its own last call has left."""
        for path, name, value in self._looks.changes:
            if token(captured.left.get((path, name), value)) != token(value):
                raise CaptureError(changes(path, name))


def _own_objects(model: nn.Module) -> None:
    """Settings in the model's modules are copied: what becomes of the user's is followed apart."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name in INTERNAL or not all(map(is_data, inside(value))):
                continue
            with suppress(Exception):  # what cannot be copied stays what it is
                vars(module)[name] = copied(value, memo)
