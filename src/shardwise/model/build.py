"""From the nodes of an exported program to the layers of a LayerGraph, for one batch size."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.graph.labels import default_dims, label_dims
from shardwise.graph.layer_graph import Layer, LayerGraph, Like, Operand, Slot
from shardwise.model.calls import draws, is_an_argument, is_made, names_of, pure, tensor_nodes
from shardwise.model.in_place import aten_name, is_counter, is_in_place, named_args
from shardwise.model.source_lines import line_of_node, located
from shardwise.operators.aten import ITEMS, OPERATORS, OTHERWISE_IN_PLACE, POINTWISE, Request

if TYPE_CHECKING:
    from shardwise.model.capture import Captured

PADDING = ("conv", "pad", "max_pool", "avg_pool")  # operators that read beyond an edge
RESHAPES = ("reshape", "view", "_unsafe_view")
AS_CALLED = ("pointwise", "whole_dim", "opaque", "made")  # operators that run the ATen call itself


@dataclass(frozen=True)
class Constant:
    """What a model returns beside tensors: None, a number, a word."""

    value: Any


class Builder:
    """Walks the exported nodes once and makes the layers for one batch size."""

    def __init__(self, captured: Captured, batch: int) -> None:
        self.captured = captured
        self.batch = batch
        self.layers: dict[str, Layer] = {}
        self.values: dict[fx.Node, Operand] = {}  # what a tensor node stands for

    def build(self) -> LayerGraph:
        returned: list[Operand | Constant] = []
        for node in self.captured._nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                with located(node):
                    self._call(node)
            elif node.op == "output":
                returned = [self._returned(arg) for arg in pytree.tree_leaves(node.args[0])]
        inputs = tuple(self.values[n].name for n in self.captured._user_inputs)
        return LayerGraph(
            layers=tuple(self.layers.values()),
            inputs=inputs,
            outputs=tuple(y.name for y in returned if isinstance(y, Operand)),
            batch=self.batch,
            training=self.captured.training,
            output_spec=self.captured.output_spec,
            numbers={i: y.value for i, y in enumerate(returned) if isinstance(y, Constant)},
            constants=self.captured.constants,
            left=self.captured.left,
            batch_is_free=self.captured.batch_is_free,
        )

    # -- nodes ---------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        shape = self._shape(node.meta["val"])
        if node.name in self.captured._names:
            kind, name = self.captured._names[node.name]
            scalar = node.meta["val"].ndim == 0
            self.values[node] = Operand(kind, name, shape, scalar)  # type: ignore[arg-type]
        else:
            self._add(node, Request("input", ()), name=node.name, shape=shape)

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            self._item(node)
        elif isinstance(value, torch.Tensor):
            if not self._counts(node):
                self._tensor(node)
        elif value is None and node.users:
            raise CaptureError(
                f"operator {node.target} of {self._path(node)!r} has no known result"
            )

    def _tensor(self, node: fx.Node) -> None:
        name = aten_name(node)
        args = self._named_args(node)
        if name in ("alias", "lift_fresh_copy"):
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
        elif name == "select":
            self._select(node, args["self"], args["dim"], args["index"])
        else:
            self._fulfil(node, self._request(node, name, args))

    def _fulfil(self, node: fx.Node, request: Request | None) -> None:
        """The layer of a request, or the layers of one that is done in several steps."""
        if request is not None and request.op == "pad" and request.attrs["mode"] != "constant":
            self._edge_pad(node, request)
        elif request is not None and request.batch_missing:
            x = self._operand(request.tensors[0])
            self._reshaped(node, request, (1, *x.shape), (1, *self._shape(node.meta["val"])))  # type: ignore[union-attr]
        elif request is not None and request.op == "linear" and node.meta["val"].ndim > 4:
            x, shape = self._operand(request.tensors[0]), self._shape(node.meta["val"])
            rows = prod(shape[:-1])  # one dimension of rows is as good as many
            self._reshaped(node, request, (rows, x.shape[-1]), (rows, shape[-1]))  # type: ignore[union-attr]
        else:
            self._add(node, request)

    def _reshaped(
        self, node: fx.Node, request: Request, given: tuple[int, ...], made: tuple[int, ...]
    ) -> None:
        """An operator on its first tensor in another shape: that of one sample, or of rows."""
        first, *others = request.tensors
        lifted = self._add(node, Request("view", (first,)), shape=given, dims=default_dims(given))
        result = self._add(node, replace(request, tensors=(lifted, *others)), shape=made)
        self._add(node, Request("view", (result,)))

    def _edge_pad(self, node: fx.Node, request: Request) -> None:
        """Padding with the tensor's own values, one dimension after the other."""
        operand = self._operand(request.tensors[0])
        assert operand is not None
        padded = [(d, pads) for d, pads in enumerate(request.attrs["pads"]) if any(pads)]
        for dim, pads in padded:
            shape = list(operand.shape)
            shape[dim] += sum(pads)
            attrs = {"mode": request.attrs["mode"], "dim": dim, "edges": pads}
            edge = Request("edge_pad", (operand,) * 3, attrs)
            operand = self._add(node, edge, shape=tuple(shape))
        self.values[node] = operand

    def _item(self, node: fx.Node) -> None:
        """One tensor of an operator that returns several."""
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        name, args = aten_name(source), self._named_args(source)
        if not node.users:
            return
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise CaptureError(f"operator {name!r} returns lists in lists, which are not supported")
        if name in ("chunk", "split", "split_with_sizes"):
            dim = args["dim"] % len(self._shape(args["self"].meta["val"]))
            parts = [self._shape(part)[dim] for part in source.meta["val"]]
            attrs = {"dim": dim, "start": sum(parts[:index]), "step": 1}
            self._add(node, Request("slice", (args["self"],), attrs))
        elif name == "unbind":
            self._select(node, args["self"], args["dim"], index)
        elif name in ITEMS and index == 0:
            self._fulfil(node, ITEMS[name](args, self._node_shape))
        else:
            self._check_item(source, index)
            self._add(node, self._opaque(source, index))

    def _check_item(self, source: fx.Node, index: int) -> None:
        """Every result of an operator is a layer that computes it anew: that must be the same."""
        used = [user for user in source.users if user.users]
        if len(used) > 1 and draws(source):
            raise CaptureError(
                f"{aten_name(source)!r} of {self._path(source) or 'the model'!r} uses random "
                "numbers, and several of its results are used; use only one of them"
            )
        if aten_name(source) == "native_group_norm" and index:
            raise CaptureError(
                "the statistics that 'native_group_norm' returns have no gradient of their own; "
                "compute them with torch.var_mean"
            )

    def _select(self, node: fx.Node, source: fx.Node, dim: int, index: int) -> None:
        """One index of a dimension: a slice, then a view without that dimension."""
        shape = self._shape(source.meta["val"])
        dim %= len(shape)
        attrs = {"dim": dim, "start": index % shape[dim], "step": 1}
        cut = (*shape[:dim], 1, *shape[dim + 1 :])
        operand = self._add(node, Request("slice", (source,), attrs), shape=cut)
        self._add(node, Request("view", (operand,)))

    def _request(self, node: fx.Node, name: str, args: dict[str, Any]) -> Request | None:
        """The operator for an ATen call, or None where it has no strategy."""
        if is_made(node, name):
            return Request("made", ())
        if name in POINTWISE:
            return Request("pointwise", ())
        try:
            return OPERATORS[name](args, self._node_shape) if name in OPERATORS else None
        except KeyError as missing:
            if is_an_argument(node.target, missing.args[0]):  # of another overload
                return None
            raise

    # -- layers --------------------------------------------------------------------------------

    def _add(
        self,
        node: fx.Node,
        request: Request | None,
        name: str | None = None,
        shape: tuple[int, ...] | None = None,
        dims: str | None = None,
    ) -> Operand:
        """Makes the layer of this request and lets the node stand for its output."""
        shape = self._shape(node.meta["val"]) if shape is None else shape
        request = self._opaque(node, None) if request is None else request
        called = request.attrs.get("node", node) if request.op in AS_CALLED else None
        tensors = request.tensors if called is None else tensor_nodes(called)
        operands = [self._operand(tensor) for tensor in tensors]
        if request.op in PADDING:
            operands[0] = self._as_value(node, operands[0])
        if request.op == "view":
            self._check_view(node, operands[0], shape)
        attrs = self._attrs(node, request, operands)
        values = [o for o in operands if o is not None and o.kind == "value"]
        inputs = [(o.shape, self.layers[o.name].dims) for o in values]
        if request.op == "made":  # only the shapes of its operands matter
            operands = []
        layer = Layer(
            name=self._unique(name or self._layer_name(node, request)),
            op=request.op,
            operands=tuple(o for o in operands if o is not None),
            shape=shape,
            dims=dims or label_dims(request.op, attrs, shape, inputs),
            attrs=attrs,
            dtype=node.meta["val"].dtype,
            scalar=node.meta["val"].ndim == 0 and shape == (1,),
            **self._call_template(called, request.op, list(tensors)),
        )
        self.layers[layer.name] = layer
        operand = self.values[node] = Operand("value", layer.name, shape, layer.scalar)
        return operand

    def _check_view(self, node: fx.Node, x: Operand | None, shape: tuple[int, ...]) -> None:
        """Sizes that were captured for other batches may not fit this one."""
        args = self._named_args(node) if aten_name(node) in RESHAPES else {}
        asked = args.get("shape", args.get("size", shape))
        fits = all(want in (-1, size) for want, size in zip(asked, shape, strict=False))
        if x is not None and (prod(x.shape) != prod(shape) or not fits):
            raise CaptureError(
                f"{repr(self._path(node)) if self._path(node) else 'the model'} calls "
                f"{aten_name(node)} with a shape that does not fit a batch of {self.batch}: "
                f"{'x'.join(map(str, x.shape))} as {'x'.join(map(str, asked))}"
            )

    def _as_value(self, node: fx.Node, operand: Operand | None) -> Operand:
        """A stored tensor as a layer: what lies beyond its edge comes with the messages."""
        assert operand is not None
        if operand.kind == "value":
            return operand
        dims, slot = default_dims(operand.shape), (Slot(0),)
        attrs = {"present": (True,), "called": "clone", "in_place": False, "written": False}
        layer = Layer(
            name=self._unique(f"{operand.name}.clone"),
            op="pointwise",
            operands=(operand,),
            shape=operand.shape,
            dims=dims,
            attrs=attrs,
            target="aten.clone.default",
            args=slot,
            dtype=node.meta["val"].dtype,
        )
        self.layers[layer.name] = layer
        return Operand("value", layer.name, operand.shape)

    def _attrs(
        self, node: fx.Node, request: Request, operands: list[Operand | None]
    ) -> dict[str, Any]:
        """The request's attributes and what strategies need to know beyond them."""
        attrs = {key: value for key, value in request.attrs.items() if key != "node"}
        attrs |= self._mode_attrs(node, request)
        attrs["present"] = tuple(o is not None for o in operands)
        if request.op in ("pointwise", "opaque", "made"):
            called = request.attrs.get("node", node)
            attrs["called"] = aten_name(called)
            if attrs["called"] == "instance_norm":
                args = self._named_args(called)
                self._check_statistics(called, args, args["use_input_stats"])
            attrs["written"] = is_in_place(called) and request.op != "made"
            attrs["in_place"] = is_in_place(called) and request.op == "pointwise"
            attrs["on_a_copy"] = is_in_place(called) and attrs["called"] in OTHERWISE_IN_PLACE
            if draws(called):
                attrs["draws"] = True
        if request.op == "reduce":
            (x,) = operands
            assert x is not None
            known = x.kind == "value"
            attrs["labels"] = self.layers[x.name].dims if known else default_dims(x.shape)
        return attrs

    def _call_template(self, called: fx.Node | None, op: str, tensors: list[Any]) -> dict[str, Any]:
        """The ATen call with slots for its tensors, of operators that are called as they are."""
        if called is None:
            return {}
        slots: dict[fx.Node, Any] = {tensor: Slot(i) for i, tensor in enumerate(tensors)}
        if op == "made":
            slots = {tensor: self._like(tensor) for tensor in tensors}

        def template(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                filled = [template(item) for item in value]
                return tuple(filled) if isinstance(value, tuple) else filled
            is_tensor = isinstance(value, fx.Node) and value in slots
            return slots[value] if is_tensor else self._int(value)

        target = called.target if op == "made" else pure(called.target)
        args, kwargs = called.args, called.kwargs
        if (
            sorted(names_of(target)) == sorted(names_of(called.target))
            and target is not called.target
        ):
            args, kwargs = (), named_args(called)  # the twin may have another order
        return {
            "target": str(target),
            "args": tuple(template(argument) for argument in args),
            "kwargs": {key: template(argument) for key, argument in kwargs.items()},
        }

    def _like(self, node: fx.Node) -> Like:
        value = node.meta["val"]
        shape = tuple(self._int(size) for size in value.shape)
        return Like(shape, self._memory_order(value), value.dtype)

    def _memory_order(self, value: torch.Tensor) -> tuple[int, ...]:
        """Dimensions from the slowest to the fastest: the order in which torch draws numbers."""
        strides = [self._int(stride) for stride in value.stride()]
        return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))

    def _opaque(self, node: fx.Node, item: int | None) -> Request:
        return Request("opaque", (), {"node": node, "item": item})

    def _mode_attrs(self, node: fx.Node, request: Request) -> dict[str, Any]:
        """Which module's training flag rules, and whether the operator ignores it."""
        if request.op not in ("batch_norm", "dropout", "feature_dropout"):
            return {}
        args = self._named_args(node)
        flag = args["training"] if request.op == "batch_norm" else args["train"]
        always = bool(flag) and not self.captured.training
        never = not flag and self.captured.training  # F.batch_norm(training=False) while training
        mode = {"module": self._path(node), "always": always, "never": never}
        if request.op == "batch_norm":
            self._check_statistics(node, args, bool(flag))
            always = always or args["running_mean"] is None
            return mode | {"always": always, "momentum": args["momentum"]}
        return mode | {"memory": self._memory_order(request.tensors[0].meta["val"]) or (0,)}

    def _check_statistics(self, node: fx.Node, args: dict[str, Any], written: bool) -> None:
        """What a norm writes into belongs to the model."""
        for name in ("running_mean", "running_var") if written else ():
            operand = self._operand(args[name])
            if operand is not None and operand.kind not in ("param", "buffer"):
                raise CaptureError(
                    f"{aten_name(node)} ({node}) writes into its {name}, which is no buffer of "
                    "the model; register it as one"
                )

    def _operand(self, value: Any) -> Operand | None:
        if value is None or isinstance(value, Operand):
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

    # -- names, shapes, arguments --------------------------------------------------------------

    def _path(self, node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path.split("@")[0] for path, _ in stack.values()]
        return next((p for p in reversed(paths) if p in self.captured._modules), "")

    def _layer_name(self, node: fx.Node, request: Request) -> str:
        path = self._path(node)
        op = aten_name(node) if node.target is not operator.getitem else request.op
        module = self.captured._modules.get(path)
        is_leaf = path and module is not None and not any(True for _ in module.children())
        if is_leaf and request.op not in ("pad", "edge_pad"):
            return path
        return f"{path}.{op}" if path else op

    def _unique(self, name: str) -> str:
        candidate, count = name, 0
        while candidate in self.layers:
            count += 1
            candidate = f"{name}_{count}"
        return candidate

    def _node_shape(self, node: fx.Node) -> tuple[int, ...]:
        return self._shape(node.meta["val"])

    def _shape(self, value: torch.Tensor) -> tuple[int, ...]:
        """The shape for this batch size; a scalar counts as one element of one dimension."""
        return tuple(self._int(size) for size in value.shape) or (1,)

    def _int(self, value: Any) -> Any:
        """A number that may depend on the batch size, made concrete."""
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        for symbolic, plain in (
            (torch.SymInt, int),
            (torch.SymFloat, float),
            (torch.SymBool, bool),
        ):
            if isinstance(value, symbolic):
                return self._evaluated(value, plain)
        return value

    def _evaluated(self, value: Any, plain: type) -> Any:
        expr = sympy.sympify(value.node.expr)
        found = expr.subs({symbol: self.batch for symbol in self.captured._symbols})
        if getattr(found, "free_symbols", None):
            raise CaptureError(
                f"the model depends on a number{self._origin(found)} that is only known when it "
                "runs: sizes and branches may depend on the shapes of inputs, not on their values"
            )
        return plain(found)

    def _origin(self, expr: Any) -> str:
        """The operators that numbers come from which depend on values."""
        for node in self.captured._nodes:
            if expr.free_symbols & set(node.meta.get("unbacked_bindings") or ()):
                path = self._path(node)
                of = f" of module {path!r}" if path else ""
                code = (node.meta.get("stack_trace") or "").strip().splitlines()[-1:]
                shown = ", ".join(part.strip() for part in (*code, line_of_node(node)) if part)
                return f" of {aten_name(node)!r}{of}{f' ({shown})' if shown else ''}"
        return f" ({expr})"

    def _named_args(self, node: fx.Node) -> dict[str, Any]:
        """Arguments by their schema names, defaults filled in, sizes made concrete."""
        if not hasattr(node.target, "_schema"):
            raise CaptureError(
                f"{self._path(node) or 'the model'!r} uses {node.target}, which is not an operator"
            )
        return {name: self._concrete(value) for name, value in named_args(node).items()}

    def _counts(self, node: fx.Node) -> bool:
        """The update of batch norm's counter, which the runtime makes itself."""
        target = node.args[0] if is_in_place(node) and node.args else None
        return is_counter(self.captured._names.get(getattr(target, "name", ""), ("", ""))[1])

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._concrete(item) for item in value]
        is_tensor = isinstance(value, fx.Node) and isinstance(
            value.meta.get("val"), (torch.Tensor, list, tuple)
        )
        return value if is_tensor else self._int(value)
