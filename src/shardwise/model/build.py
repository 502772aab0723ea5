"""From the nodes of an exported program to the layers of a LayerGraph, for inputs of one size."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.graph.labels import default_dims, each_once
from shardwise.graph.layer_graph import Layer, LayerGraph, Like, Operand, Slot, Traits
from shardwise.model.exported import Exported, Numbers, evaluated
from shardwise.model.in_place import is_counter
from shardwise.model.regions import autocast_of
from shardwise.model.source_lines import line_of_node, located
from shardwise.operators.calls import (
    PREVIOUS,
    Call,
    Request,
    aten_name,
    bare,
    call_template,
    is_in_place,
    named_args,
)
from shardwise.operators.reader_labels import labelled_by_readers
from shardwise.operators.strategy import STRATEGIES, read

SYMBOLIC: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
RENAMES = ("alias", "lift_fresh_copy")  # calls that only give a tensor another name


@dataclass(frozen=True)
class Constant:
    """What a model returns beside tensors: None, a number, a word."""

    value: Any


class Builder:
    """Walks the exported nodes once and makes the layers for inputs of one size."""

    def __init__(self, exported: Exported, numbers: Numbers, batch: int, training: bool) -> None:
        self.exported, self.numbers = exported, numbers
        self.batch, self.training = batch, training
        self.known: dict[Any, Any] = {}  # what expressions of free sizes amount to
        self.layers: dict[str, Layer] = {}
        self.values: dict[fx.Node, Operand] = {}  # what a tensor node stands for

    def build(self) -> LayerGraph:
        returned: list[Operand | Constant] = []
        for node in self.exported.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                with located(node):
                    self._call(node)
            elif node.op == "output":
                returned = [self._returned(arg) for arg in pytree.tree_leaves(node.args[0])]
        inputs = tuple(self.values[n].name for n in self.exported.inputs)
        outputs = tuple(y.name for y in returned if isinstance(y, Operand))
        return LayerGraph(
            layers=labelled_by_readers(_read(self.layers.values(), outputs)),
            inputs=inputs,
            outputs=outputs,
            batch=self.batch,
            training=self.training,
            output_spec=self.exported.output_spec,
            numbers={i: y.value for i, y in enumerate(returned) if isinstance(y, Constant)},
            constants=self.exported.constants,
            left=self.exported.left,
        )

    # -- nodes ---------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        shape = self._shape(node.meta["val"])
        if node.name in self.exported.names:
            kind, name = self.exported.names[node.name]
            scalar = node.meta["val"].ndim == 0
            self.values[node] = Operand(kind, name, shape, scalar)  # type: ignore[arg-type]
        else:
            self._add(node, None, Request("input", ()), node.name)

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            self._item(node)
        elif isinstance(value, torch.Tensor):
            if aten_name(node) in RENAMES:
                self.values[node] = self.values[node.args[0]]  # type: ignore[index]
            elif not self._counts(node):
                self._fulfil(node, Call(node, self._named_args(node), self))
        elif value is None and node.users:
            raise CaptureError(
                f"operator {node.target} of {self.module_of(node)!r} has no known result"
            )

    def _item(self, node: fx.Node) -> None:
        """One tensor of an operator that returns several."""
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        if not node.users:
            return
        call = Call(source, self._named_args(source), self, index)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise CaptureError(
                f"operator {call.name!r} returns lists in lists, which are not supported"
            )
        self._fulfil(node, call)

    def _fulfil(self, node: fx.Node, call: Call) -> None:
        """The layers that compute a call; the node stands for the result of the last one."""
        requests = read(call)
        if not requests:
            self.values[node] = self._operand(call.x)  # type: ignore[assignment]
        for request in requests:
            before = request.op == "view" and request is not requests[-1]  # of who has the name
            self._add(node, call, request, self._inside(node, "view") if before else None)

    # -- layers --------------------------------------------------------------------------------

    def _add(
        self, node: fx.Node, call: Call | None, request: Request, name: str | None = None
    ) -> None:
        """Makes the layer of this request and lets the node stand for its output."""
        strategy, value = STRATEGIES[request.op], node.meta["val"]
        shape = self._shape(value) if request.shape is None else request.shape
        tensors = [node if tensor is PREVIOUS else tensor for tensor in request.tensors]
        operands = [self._operand(tensor) for tensor in tensors]
        if strategy.reads_beyond:
            operands[0] = self._as_value(node, operands[0])
        values = [o for o in operands if o is not None and o.kind == "value"]
        inputs = [(o.shape, self.layers[o.name].dims) for o in values]
        called: dict[str, Any] = {}
        if strategy.as_called and call is not None:
            places = [
                self._like(t) if strategy.shapes_only else Slot(i) for i, t in enumerate(tensors)
            ]
            called = call_template(call.node, tensors, places, self._int)
        layer = Layer(
            name=self._unique(name or self._layer_name(node, request)),
            op=request.op,
            operands=() if strategy.shapes_only else tuple(o for o in operands if o is not None),
            shape=shape,
            dims=request.dims or each_once(strategy.labels(request.attrs, shape, inputs), shape),
            attrs=request.attrs,
            traits=replace(request.traits, autocast=autocast_of(node)),
            present=tuple(o is not None for o in operands),
            dtype=request.dtype or value.dtype,
            scalar=value.ndim == 0 and shape == (1,),
            **called,
        )
        self.values[node] = self._output(layer)

    def _as_value(self, node: fx.Node, operand: Operand | None) -> Operand:
        """A stored tensor as a layer: what lies beyond its edge comes with the messages."""
        assert operand is not None
        if operand.kind == "value":
            return operand
        layer = Layer(
            name=self._unique(f"{operand.name}.clone"),
            op="pointwise",
            operands=(operand,),
            shape=operand.shape,
            dims=default_dims(operand.shape),
            attrs=None,
            traits=Traits(called="clone"),
            present=(True,),
            target="aten.clone.default",
            args=(Slot(0),),
            dtype=node.meta["val"].dtype,
        )
        return self._output(layer)

    def _output(self, layer: Layer) -> Operand:
        """Takes a layer into the graph; what reads its output."""
        self.layers[layer.name] = layer
        return Operand("value", layer.name, layer.shape, layer.scalar)

    def _like(self, node: fx.Node) -> Like:
        shape = tuple(self._int(size) for size in node.meta["val"].shape)
        return Like(shape, self.memory_order_of(node), node.meta["val"].dtype)

    def _operand(self, value: Any) -> Operand | None:
        if value is None:
            return value
        if value not in self.values:
            raise CaptureError(f"{value} is used before it is computed")
        return self.values[value]

    def _returned(self, arg: Any) -> Operand | Constant:
        if not isinstance(arg, fx.Node) or arg not in self.values:
            return Constant(self._int(arg))  # perhaps of the batch size
        operand = self.values[arg]
        if operand.kind != "value":
            raise CaptureError(f"the model returns its {operand.kind} {operand.name!r} unchanged")
        return operand

    # -- what calls ask ------------------------------------------------------------------------

    def shape_of(self, tensor: Any) -> tuple[int, ...]:
        return self._shape(tensor.meta["val"] if isinstance(tensor, fx.Node) else tensor)

    def labels_of(self, tensor: Any) -> str:
        operand = self._operand(tensor)
        assert operand is not None
        known = operand.kind == "value"
        return self.layers[operand.name].dims if known else default_dims(operand.shape)

    def memory_order_of(self, tensor: Any) -> tuple[int, ...]:
        """Dimensions from the slowest to the fastest: the order in which torch draws numbers."""
        strides = [self._int(stride) for stride in tensor.meta["val"].stride()]
        return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))

    def is_stored(self, tensor: Any) -> bool:
        operand = self._operand(tensor)
        return operand is not None and operand.kind in ("param", "buffer")

    def module_of(self, node: fx.Node) -> str:
        """The path of the module that makes a call."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path.split("@")[0] for path, _ in stack.values()]
        return next((p for p in reversed(paths) if p in self.exported.modules), "")

    # -- names, shapes, arguments --------------------------------------------------------------

    def _layer_name(self, node: fx.Node, request: Request) -> str:
        path = self.module_of(node)
        is_item = node.target is operator.getitem
        op = request.traits.called or request.op if is_item else bare(aten_name(node))
        module = self.exported.modules.get(path)
        is_leaf = path and module is not None and not any(True for _ in module.children())
        if is_leaf and not STRATEGIES[request.op].part_of_layer:
            return path
        return self._inside(node, op)

    def _inside(self, node: fx.Node, op: str) -> str:
        """The name of a step within the module that makes a call."""
        path = self.module_of(node)
        return f"{path}.{op}" if path else op

    def _unique(self, name: str) -> str:
        candidate, count = name, 0
        while candidate in self.layers:
            count += 1
            candidate = f"{name}_{count}"
        return candidate

    def _shape(self, value: torch.Tensor) -> tuple[int, ...]:
        """The shape for these inputs; a scalar counts as one element of one dimension."""
        return tuple(self._int(size) for size in value.shape) or (1,)

    def _int(self, value: Any) -> Any:
        """A number that may depend on the sizes of inputs, made concrete."""
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        plain = SYMBOLIC.get(type(value))
        return value if plain is None else self._evaluated(value, plain)

    def _evaluated(self, value: Any, plain: type) -> Any:
        expression = value.node.expr
        if expression not in self.known:
            try:
                self.known[expression] = plain(evaluated(expression, self.numbers))
            except KeyError:
                raise CaptureError(
                    f"the model depends on a number{self._origin(expression)} that is only known "
                    "when it runs: sizes and branches may depend on the shapes of inputs, not on "
                    "their values"
                ) from None
        return self.known[expression]

    def _origin(self, expr: Any) -> str:
        """The operators that numbers come from which depend on values."""
        for node in self.exported.nodes:
            if expr.free_symbols & set(node.meta.get("unbacked_bindings") or ()):
                path = self.module_of(node)
                of = f" of module {path!r}" if path else ""
                code = (node.meta.get("stack_trace") or "").strip().splitlines()[-1:]
                shown = ", ".join(part.strip() for part in (*code, line_of_node(node)) if part)
                return f" of {bare(aten_name(node))!r}{of}{f' ({shown})' if shown else ''}"
        return f" ({expr})"

    def _named_args(self, node: fx.Node) -> dict[str, Any]:
        """Arguments by their schema names, defaults filled in, sizes made concrete."""
        if not hasattr(node.target, "_schema"):
            of = self.module_of(node) or "the model"
            raise CaptureError(f"{of!r} uses {node.target}, which is not an operator")
        return {name: self._concrete(value) for name, value in named_args(node).items()}

    def _counts(self, node: fx.Node) -> bool:
        """The update of batch norm's counter, which the runtime makes itself."""
        target = node.args[0] if is_in_place(node) and node.args else None
        return is_counter(self.exported.names.get(getattr(target, "name", ""), ("", ""))[1])

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._concrete(item) for item in value]
        is_tensor = isinstance(value, fx.Node) and isinstance(
            value.meta.get("val"), (torch.Tensor, list, tuple)
        )
        return value if is_tensor else self._int(value)


def _read(layers: Iterable[Layer], outputs: tuple[str, ...]) -> tuple[Layer, ...]:
    """The layers without views that nobody reads, because who did reads what they are views of."""
    kept, wanted = [], set(outputs)
    for layer in reversed(tuple(layers)):
        if layer.op != "view" or layer.name in wanted:
            kept.append(layer)
            wanted.update(layer.inputs)
    return tuple(reversed(kept))
