"""From an nn.Module to a LayerGraph, through torch.export."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from shardwise.dims import default_dims, label_dims
from shardwise.errors import CaptureError
from shardwise.graph import Layer, LayerGraph, Operand, Slot
from shardwise.operators import OPERATORS, POINTWISE, Request

VIEWS = frozenset(
    """view reshape flatten unflatten squeeze unsqueeze permute transpose t slice select narrow
    chunk split split_with_sizes unbind expand detach alias contiguous _unsafe_view""".split()  # noqa: SIM905
)

AS_CALLED = ("pointwise", "whole_dim", "opaque")  # operators that run the ATen call itself


def capture(model: nn.Module, *inputs: torch.Tensor) -> LayerGraph:
    """The layer graph of a model in training mode, for inputs of these shapes.

    >>> graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(2, 3, 8, 8))
    >>> print(graph)
    input: input() -> 2x3x8x8
    0: conv(input) -> 2x8x6x6
    1: relu(0) -> 2x8x6x6
    """
    return Captured(model, inputs, training=True).graph(inputs[0].shape[0])


class Captured:
    """A model exported once in one mode; gives its layer graph for any batch size."""

    def __init__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...], training: bool) -> None:
        if not inputs or not all(isinstance(x, torch.Tensor) and x.ndim for x in inputs):
            raise CaptureError("the example input must be tensors whose first dimension is samples")
        self.training = training
        self._modules = dict(model.named_modules())
        self._fixed_batch = inputs[0].shape[0]
        with _mode(model, training):
            program = _export(model, inputs)
        self._nodes = list(program.graph.nodes)
        signature = program.graph_signature
        self._names: dict[str, tuple[str, str]] = {}
        first = _first_names(model)  # torch.export calls tied ones by their last
        for kind, mapping in (
            ("param", signature.inputs_to_parameters),
            ("buffer", signature.inputs_to_buffers),
            ("constant", signature.inputs_to_lifted_tensor_constants),
        ):
            self._names |= {node: (kind, first.get(n, n)) for node, n in mapping.items()}
        self.constants = {
            name: program.constants[name]
            for kind, name in self._names.values()
            if kind == "constant"
        }
        self.output_spec = program.call_spec.out_spec
        self._user_inputs = [n for n in self._nodes if n.name in signature.user_inputs]
        self._symbols = {
            symbol
            for node in self._user_inputs
            for size in node.meta["val"].shape
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        }
        self._graphs: dict[int, LayerGraph] = {}

    @property
    def batch_is_free(self) -> bool:
        return bool(self._symbols)

    def graph(self, batch: int) -> LayerGraph:
        """The layer graph for this many samples."""
        if not self.batch_is_free and batch != self._fixed_batch:
            raise CaptureError(
                f"this model was captured for batches of {self._fixed_batch} only (its forward "
                f"depends on the batch size), and got {batch} samples"
            )
        if batch not in self._graphs:
            self._graphs[batch] = _Builder(self, batch).build()
        return self._graphs[batch]


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter and buffer: that of tied ones in named_parameters()."""
    first: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All modules in one mode, and momentum=None (which reads a counter) out of the way."""
    flags = {module: module.training for module in model.modules()}
    cumulative = [m for m in model.modules() if getattr(m, "momentum", 0.1) is None]
    try:
        model.train(training)
        for module in cumulative:
            module.momentum = 0.1  # type: ignore[assignment]
        yield
    finally:
        for module in cumulative:
            module.momentum = None  # type: ignore[assignment]
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def _silent() -> Iterator[None]:
    """Torch logs a traceback of a shape that does not fit, before it raises: ours is a sentence."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _export(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    # A batch of one would be taken for a constant, so one sample is shown as two.
    batch = max(2, inputs[0].shape[0])
    examples = tuple(x.new_empty((batch, *x.shape[1:])) for x in inputs)
    free = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
    try:
        with torch.no_grad(), _silent():
            program = torch.export.export(model, examples, dynamic_shapes=free, strict=False)
            values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
            is_free = any(isinstance(s, torch.SymInt) for v in values for s in v.shape)
            if is_free or batch == inputs[0].shape[0]:
                return program
            return torch.export.export(model, inputs, strict=False)
    except Exception as error:
        shapes = ", ".join("x".join(map(str, x.shape)) for x in inputs)
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise CaptureError(
            f"{type(model).__name__} cannot be captured for input {shapes}: {reason.strip()}"
        ) from error


class _Builder:
    """Walks the exported nodes once and makes the layers for one batch size."""

    def __init__(self, captured: Captured, batch: int) -> None:
        self.captured = captured
        self.batch = batch
        self.layers: dict[str, Layer] = {}
        self.values: dict[fx.Node, Operand] = {}  # what a tensor node stands for
        self.roots: dict[fx.Node, fx.Node] = {}  # the node whose memory a view shares
        self.last_use = {
            node: max((position[user] for user in node.users), default=-1)
            for position in [{n: i for i, n in enumerate(captured._nodes)}]
            for node in position
        }

    def build(self) -> LayerGraph:
        outputs: list[str] = []
        for index, node in enumerate(self.captured._nodes):
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(index, node)
            elif node.op == "output":
                outputs = [self._returned(arg) for arg in pytree.tree_leaves(node.args[0])]
        inputs = tuple(self.values[n].name for n in self.captured._user_inputs)
        return LayerGraph(
            layers=tuple(self.layers.values()),
            inputs=inputs,
            outputs=tuple(outputs),
            batch=self.batch,
            training=self.captured.training,
            output_spec=self.captured.output_spec,
            constants=self.captured.constants,
            batch_is_free=self.captured.batch_is_free,
        )

    # -- nodes ---------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        shape = self._shape(node.meta["val"])
        if node.name in self.captured._names:
            kind, name = self.captured._names[node.name]
            self.values[node] = Operand(kind, name, shape)  # type: ignore[arg-type]
        else:
            self._add(node, Request("input", ()), name=node.name, shape=shape)

    def _call(self, index: int, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            self._item(node)
        elif isinstance(value, torch.Tensor):
            written = self._written(index, node)
            if not self._is_counter(node):
                self._tensor(node)
                if written is not None:  # later readers of it see the result
                    self.values[written] = self.values[node]
        elif isinstance(value, (list, tuple)):
            source = node.args[0]
            if isinstance(source, fx.Node):
                self.roots[node] = self.roots.get(source, source)
        elif value is None and node.users:
            raise CaptureError(
                f"operator {node.target} of {self._path(node)!r} has no known result"
            )

    def _tensor(self, node: fx.Node) -> None:
        name = _aten_name(node)
        args = self._named_args(node)
        if name in VIEWS and isinstance(node.args[0], fx.Node):
            self.roots[node] = self.roots.get(node.args[0], node.args[0])
        if name in ("alias", "lift_fresh_copy", "detach_"):
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
        elif name == "select":
            self._select(node, args["self"], args["dim"], args["index"])
        else:
            request = self._request(name, args)
            if request is not None and request.op == "pad" and request.attrs["mode"] != "constant":
                self._edge_pad(node, request)
            else:
                self._add(node, request)

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
        name, args = _aten_name(source), self._named_args(source)
        self.roots[node] = self.roots.get(source, source)
        if name in ("chunk", "split", "split_with_sizes"):
            dim = args["dim"] % len(self._shape(args["self"].meta["val"]))
            parts = [self._shape(part)[dim] for part in source.meta["val"]]
            attrs = {"dim": dim, "start": sum(parts[:index]), "step": 1}
            self._add(node, Request("slice", (args["self"],), attrs))
        elif name == "unbind":
            self._select(node, args["self"], args["dim"], index)
        elif name.startswith("adaptive_max_pool") and index == 0:
            self._add(node, Request("adaptive_max_pool", (args["self"],)))
        else:
            self._add(node, self._opaque(source, index))

    def _select(self, node: fx.Node, source: fx.Node, dim: int, index: int) -> None:
        """One index of a dimension: a slice, then a view without that dimension."""
        shape = self._shape(source.meta["val"])
        dim %= len(shape)
        attrs = {"dim": dim, "start": index % shape[dim], "step": 1}
        cut = (*shape[:dim], 1, *shape[dim + 1 :])
        operand = self._add(node, Request("slice", (source,), attrs), shape=cut)
        self._add(node, Request("view", (operand,)))

    def _request(self, name: str, args: dict[str, Any]) -> Request | None:
        """The operator for an ATen call, or None where it has no strategy."""
        if name in POINTWISE:
            return Request("pointwise", ())
        try:
            return OPERATORS[name](args, self._node_shape) if name in OPERATORS else None
        except KeyError:  # an overload without that argument
            return None

    # -- layers --------------------------------------------------------------------------------

    def _add(
        self,
        node: fx.Node,
        request: Request | None,
        name: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Operand:
        """Makes the layer of this request and lets the node stand for its output."""
        shape = self._shape(node.meta["val"]) if shape is None else shape
        request = self._opaque(node, None) if request is None else request
        called = request.attrs.get("node", node) if request.op in AS_CALLED else None
        tensors = request.tensors if called is None else _tensor_nodes(called)
        operands = [self._operand(tensor) for tensor in tensors]
        attrs = self._attrs(node, request, operands)
        values = [o for o in operands if o is not None and o.kind == "value"]
        inputs = [(o.shape, self.layers[o.name].dims) for o in values]
        layer = Layer(
            name=self._unique(name or self._layer_name(node, request)),
            op=request.op,
            operands=tuple(o for o in operands if o is not None),
            shape=shape,
            dims=label_dims(request.op, attrs, shape, inputs),
            attrs=attrs,
            **self._call_template(called, list(tensors)),
        )
        self.layers[layer.name] = layer
        operand = self.values[node] = Operand("value", layer.name, shape)
        return operand

    def _attrs(
        self, node: fx.Node, request: Request, operands: list[Operand | None]
    ) -> dict[str, Any]:
        """The request's attributes and what strategies need to know beyond them."""
        attrs = {key: value for key, value in request.attrs.items() if key != "node"}
        attrs |= self._mode_attrs(node, request)
        attrs["present"] = tuple(o is not None for o in operands)
        if request.op in ("pointwise", "opaque"):
            called = request.attrs.get("node", node)
            attrs["called"] = _aten_name(called)
            attrs["in_place"] = _is_in_place(called)
        if request.op == "reduce":
            (x,) = operands
            assert x is not None
            known = x.kind == "value"
            attrs["labels"] = self.layers[x.name].dims if known else default_dims(x.shape)
        return attrs

    def _call_template(self, called: fx.Node | None, tensors: list[Any]) -> dict[str, Any]:
        """The ATen call with slots for its tensors, of operators that are called as they are."""
        if called is None:
            return {}
        slots = {tensor: Slot(index) for index, tensor in enumerate(tensors)}

        def template(node: fx.Node) -> Any:
            return slots[node] if node in slots else self._int(node)

        return {
            "target": str(_pure(called.target)),
            "args": tuple(fx.map_arg(called.args, template)),  # type: ignore[arg-type]
            "kwargs": fx.map_arg(called.kwargs, template),
        }

    def _opaque(self, node: fx.Node, item: int | None) -> Request:
        return Request("opaque", (), {"node": node, "item": item})

    def _mode_attrs(self, node: fx.Node, request: Request) -> dict[str, Any]:
        """Which module's training flag rules, and whether the operator ignores it."""
        if request.op not in ("batch_norm", "dropout", "feature_dropout"):
            return {}
        args = self._named_args(node)
        flag = args["training"] if request.op == "batch_norm" else args["train"]
        always = bool(flag) and not self.captured.training
        mode = {"module": self._path(node), "always": always}
        if request.op == "batch_norm":
            return mode | {"always": always or args["running_mean"] is None}
        # torch draws a mask in the order of memory, so remember that of the input
        strides = [self._int(stride) for stride in args["input"].meta["val"].stride()]
        order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
        return mode | {"order": order}

    def _operand(self, value: Any) -> Operand | None:
        if value is None or isinstance(value, Operand):
            return value
        if value not in self.values:
            raise CaptureError(f"{value} is used before it is computed")
        return self.values[value]

    def _returned(self, arg: Any) -> str:
        if not isinstance(arg, fx.Node):
            raise CaptureError(f"the model returns {arg!r}, which is not a tensor")
        operand = self.values[arg]
        if operand.kind != "value":
            raise CaptureError(f"the model returns its {operand.kind} {operand.name!r} unchanged")
        return operand.name

    # -- in-place operators --------------------------------------------------------------------

    def _written(self, index: int, node: fx.Node) -> fx.Node | None:
        """The tensor an in-place operator writes to; refuses if another one shares its memory."""
        name = _aten_name(node, strip=False)
        if not _is_in_place(node) or not node.args:
            return None
        written = node.args[0]
        assert isinstance(written, fx.Node)
        if written.op == "placeholder" and written.name in self.captured._names:
            if not self._is_counter(node):
                buffer = self.captured._names[written.name][1]
                raise CaptureError(f"the model writes into {buffer!r} in its forward pass")
            return None
        root = self.roots.get(written, written)
        aliases = [n for n, r in self.roots.items() if r is root and n is not written]
        aliases += [root] if root is not written else []
        for alias in aliases:
            if self.last_use[alias] > index:
                raise CaptureError(
                    f"{self._path(node) or 'the model'!r} writes in place ({name}) into a tensor "
                    f"that shares memory with {alias.name!r}, which is read later; use the "
                    f"operator that is not in place"
                )
        self.roots[node] = root
        return written

    def _is_counter(self, node: fx.Node) -> bool:
        """The update of batch norm's num_batches_tracked, which batch_norm does itself."""
        target = node.args[0] if node.args else None
        name = self.captured._names.get(getattr(target, "name", ""), ("", ""))[1]
        return name.endswith("num_batches_tracked")

    # -- names, shapes, arguments --------------------------------------------------------------

    def _path(self, node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path.split("@")[0] for path, _ in stack.values()]
        return next((p for p in reversed(paths) if p in self.captured._modules), "")

    def _layer_name(self, node: fx.Node, request: Request) -> str:
        path = self._path(node)
        op = _aten_name(node) if node.target is not operator.getitem else request.op
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
        if isinstance(value, torch.SymInt):
            expr = sympy.sympify(value.node.expr)
            return int(expr.subs({symbol: self.batch for symbol in self.captured._symbols}))
        return value

    def _named_args(self, node: fx.Node) -> dict[str, Any]:
        """Arguments by their schema names, defaults filled in, sizes made concrete."""
        schema = node.target._schema  # type: ignore[union-attr]
        named = {}
        for position, argument in enumerate(schema.arguments):
            if position < len(node.args):
                value = node.args[position]
            else:
                value = node.kwargs.get(argument.name, argument.default_value)
            named[argument.name] = self._concrete(value)
        return named

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._concrete(item) for item in value]
        is_tensor = isinstance(value, fx.Node) and isinstance(
            value.meta.get("val"), (torch.Tensor, list, tuple)
        )
        return value if is_tensor else self._int(value)


def _aten_name(node: fx.Node, strip: bool = True) -> str:
    """The operator's name, without the underscore of its in-place twin."""
    name = str(getattr(node.target, "_schema", node.target)).split("(")[0]
    name = name.split("::")[-1].split(".")[0]
    return name.rstrip("_") if strip and not name.startswith("_") else name


def _is_in_place(node: fx.Node) -> bool:
    name = _aten_name(node, strip=False)
    return name.endswith("_") and not name.startswith("_")


def _pure(target: Any) -> Any:
    """The operator that is not in place."""
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.startswith("_"):
        return target
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    overload = getattr(packet, target._overloadname, None)
    if overload is None:
        raise CaptureError(f"the in-place operator {target} has no twin that is not in place")
    return overload


def _tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensors among a call's arguments, each once, in order."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
