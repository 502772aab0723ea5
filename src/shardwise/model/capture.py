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
from shardwise.model.attribute_values import Reads, copied, inside, is_data, token
from shardwise.model.attribute_writes import Left, changes
from shardwise.model.attributes import INTERNAL, Looks
from shardwise.model.exported import Shapes
from shardwise.model.origin import Origin, fingerprint_of
from shardwise.model.torch_export import Captured, Sizes, check_example, shapes_of
from shardwise.model.weightless import weightless
from shardwise.modules import assign, copy_structure, named_tensors
from shardwise.tensors import memory_order

Graphs = Callable[[bool, Sizes], LayerGraph]  # from (training, sizes of inputs) to their graph


@torch.inference_mode(False)
def capture(
    model: nn.Module,
    *inputs: torch.Tensor,
    training: bool = True,
    sizes_vary: bool | None = None,
) -> LayerGraph:
    """The layer graph of a model, in training mode or not, for inputs of these shapes.

    Where sizes of inputs will vary, as they do in inference, the model is exported for all of them
    at once, which takes longer.

    >>> graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(2, 3, 8, 8))
    >>> print(graph)
    input: input() -> 2x3x8x8
    0: conv(input) -> 2x8x6x6
    1: relu(0) -> 2x8x6x6
    """
    check_example(model, inputs)
    sizes_vary = not training if sizes_vary is None else sizes_vary
    home = next((param.device for param in model.parameters()), torch.device("cpu"))
    shapes = shapes_of(inputs)
    if not all(x.is_contiguous() and x.device == home and not x.is_meta for x in inputs):
        captured = Captured(model, inputs, training, sizes_vary=sizes_vary)
        origin = Origin(lambda _, sizes: captured.graph(sizes))
        return replace(captured.graph(shapes), origin=origin)
    dtypes = tuple(x.dtype for x in inputs)
    graphs, seen = ModelGraphs(model, shapes, dtypes, sizes_vary), fingerprint_of(model)
    return replace(graphs(training, shapes), origin=Origin(graphs, seen, shapes, dtypes))


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
        shapes: Shapes,
        dtypes: tuple[torch.dtype | None, ...] = (),
        sizes_vary: bool = False,
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
        self._looks, self._sizes_vary = UNCHANGED, sizes_vary
        self._captured: dict[tuple[bool, Kinds, Looks], Captured] = {}  # the last used is last
        self.reads: dict[Any, set[str]] = {}  # attributes that forward reads, see `Reads`
        self._lock = threading.RLock()  # a loader asks beside the pass that runs

    def __call__(self, training: bool, sizes: Sizes) -> LayerGraph:
        """The graph for inputs and parameters of the types that they had last."""
        with self._lock:
            return self._of(training).graph(sizes)

    def typed(
        self, training: bool, sizes: Sizes, kinds: Kinds, looks: Looks = UNCHANGED
    ) -> LayerGraph:
        """The graph where inputs and parameters are of these types, and modules look like this."""
        with self._lock:
            self._looks = looks
            self._retype(kinds.in_order)
            graph = self._of(training).graph(sizes)
            if kinds.orders != self._kinds.orders and graph.depends_on_memory:
                self._retype(kinds)
                graph = self._of(training).graph(sizes)
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
            settings |= {"sizes_vary": self._sizes_vary, "noted": self._note}
            captured = Captured(model, self._inputs, training, **settings)
        self._captured[key] = captured
        while len(self._captured) > MOST_CAPTURED:
            del self._captured[next(iter(self._captured))]
        return captured

    def _note(self, reads: Reads, left: Left) -> None:
        """What an export has read; refuses a model that goes on from what its last call left."""
        for path, name, value in self._looks.changes:
            if token(left.get((path, name), value)) != token(value):
                raise CaptureError(changes(path, name))
        for path, names in reads.items():
            self.reads.setdefault(path, set()).update(names)


def _own_objects(model: nn.Module) -> None:
    """Settings in the model's modules are copied: what becomes of the user's is followed apart."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name in INTERNAL or not all(map(is_data, inside(value))):
                continue
            with suppress(Exception):  # what cannot be copied stays what it is
                vars(module)[name] = copied(value, memo)
