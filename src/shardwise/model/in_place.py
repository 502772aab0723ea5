"""In-place operators of an exported graph, made explicit: after this pass no tensors share memory.

A view knows the tensor it looks into. Writing into a view gives the view a new value, and from that
every tensor on the way to the one that owns the memory; whoever reads another view of that memory
later looks into the new value.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from shardwise.errors import CaptureError
from shardwise.model.source_lines import located
from shardwise.operators.calls import aten_name, is_in_place, named_args, permuted

aten = torch.ops.aten

RESHAPES = frozenset(
    """view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as
    reshape_as""".split()  # noqa: SIM905
)
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
SAME = frozenset(("alias", "contiguous", "to", "lift_fresh", "type_as", *DROPOUTS))
PERMUTATIONS = frozenset(("permute", "transpose", "t", "swapaxes", "swapdims", "numpy_T"))
END = 2**63 - 1
WHOLE = ((None, None, 1), (0, END, 1), (None, END, 1), (0, None, 1))  # slices of all there is
# What writes into a part of a tensor: the operator, and where the arguments of the view say it is.
SCATTERS = {
    "select": (aten.select_scatter.default, ("dim", "index")),
    "slice": (aten.slice_scatter.default, ("dim", "start", "end", "step")),
    "diagonal": (aten.diagonal_scatter.default, ("offset", "dim1", "dim2")),
}
COPY = aten.lift_fresh_copy.default  # of a constant; torch.export takes it for a view


def functional(graph: fx.Graph, stored: Mapping[str, str], inputs: Collection[str]) -> fx.Graph:
    """A graph that computes the same, in which nothing that is written to is a view.

    Operators stay in place where they overwrite a whole tensor: whether somebody still reads what
    was there before shows in the graph now. Placeholders of `stored` tensors, here with their
    names, and of inputs outlive the call and may not be written to.
    """
    return _Functional(stored, inputs).rewritten(graph)


def is_counter(name: str) -> bool:
    """Batch norm's counter of batches, which the runtime counts up itself."""
    return name.endswith("num_batches_tracked")


class _Functional:
    def __init__(self, stored: Mapping[str, str], inputs: Collection[str]) -> None:
        self.graph, self.stored, self.inputs = fx.Graph(), stored, inputs
        self.parents: dict[fx.Node, fx.Node] = {}  # of each view, the tensor that it looks into
        self.values: dict[fx.Node, fx.Node] = {}  # of each old node, a new one that shows it
        self.shown: dict[fx.Node, int] = {}  # the version of its memory which that one shows
        self.versions: dict[fx.Node, int] = {}  # how often the memory of a node was written to

    def rewritten(self, graph: fx.Graph) -> fx.Graph:
        for node in graph.nodes:
            with located(node):
                self._rewrite(node)
        return self.graph

    def _rewrite(self, node: fx.Node) -> None:
        parent = _parent(node)
        if parent is not None:
            self.parents[node] = parent
        writes = is_in_place(node) and node.args and isinstance(node.args[0], fx.Node)
        before = self._way(node.args[0]) if writes else []  # type: ignore[arg-type]
        _check_writes(node)
        self.values[node] = self._copied(node)
        self.shown[node] = self.versions.get(self._owner(node), 0)
        if writes:
            self._write(node, before)

    def _copied(self, node: fx.Node) -> fx.Node:
        """The same operator, on what its operands show now."""
        if node.target is aten.copy_.default:  # its twin has no derivative
            target, source = (self._present(arg) for arg in node.args[:2])  # type: ignore[arg-type]
            return self._emit(aten.expand_as.default, (self._cast(source, target), target), node)
        copied = self.graph.node_copy(node, self._present)
        copied.name = node.name  # by which the program's signature knows it
        return copied

    def _cast(self, source: fx.Node, target: fx.Node) -> fx.Node:
        value, dtype = source.meta["val"], target.meta["val"].dtype
        if value.dtype == dtype:
            return source
        cast = self._emit(aten.to.dtype, (source, dtype), source)
        cast.meta["val"] = value.to(dtype)
        return cast

    def _owner(self, node: fx.Node) -> fx.Node:
        """The node whose memory this one looks into."""
        while node in self.parents:
            node = self.parents[node]
        return node

    def _present(self, node: fx.Node) -> fx.Node:
        """What this node shows now."""
        version = self.versions.get(self._owner(node), 0)
        if self.shown[node] != version:
            of = self._present(self.parents[node])
            self._show(node, self._seen_again(node, of), version)
        return self.values[node]

    def _show(self, node: fx.Node, value: fx.Node, version: int) -> None:
        self.values[node], self.shown[node] = value, version

    def _seen_again(self, view: fx.Node, of: fx.Node) -> fx.Node:
        """The same view of a new value."""
        if is_in_place(view):
            return of
        if view.target is operator.getitem:
            source, index = view.args
            assert isinstance(source, fx.Node)
            parts = self._emit(source.target, (of, *source.args[1:]), source)
            return self._emit(operator.getitem, (parts, index), view)
        return self._emit(view.target, (of, *view.args[1:]), view)

    def _way(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """From a view to the owner of its memory, each with what it shows before the write."""
        way = [(node, self._present(node))]
        while node in self.parents:
            node = self.parents[node]
            way.append((node, self._present(node)))
        return way

    def _write(self, node: fx.Node, way: list[tuple[fx.Node, fx.Node]]) -> None:
        """Everything on the way from the written view to the owner gets its new value."""
        (target, _), *parents = way
        name = self.stored.get(way[-1][0].name)
        if name is not None and is_counter(name):
            return
        if name is not None:
            raise CaptureError(f"the model writes into {name!r} in its forward pass")
        if way[-1][0].name in self.inputs:
            raise CaptureError(
                f"the model writes in place ({aten_name(node, strip=False)}) into its input "
                f"{way[-1][0].name!r}; use the operator that is not in place (inplace=False)"
            )
        owner, value = way[-1][0], self.values[node]
        version = self.versions[owner] = self.versions.get(owner, 0) + 1
        self._show(target, value, version)
        for parent, before in parents:
            value = self._scattered(target, before, value)
            self._show(parent, value, version)
            target = parent
        self.parents[node] = way[0][0]
        self.shown[node] = version

    def _scattered(self, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        """What the view looks into, with this value in the place of the view."""
        if is_in_place(view):
            return value
        if view.target is operator.getitem:
            return self._scattered_part(view, base, value)
        name, args = aten_name(view), named_args(view)
        if name in SAME:
            return value
        if name in RESHAPES:
            return self._emit(aten.reshape_as.default, (value, base), base)
        if name in PERMUTATIONS:
            order = permuted(name, args, base.meta["val"].ndim)
            inverse = [order.index(dim) for dim in range(len(order))]
            return self._emit(aten.permute.default, (value, inverse), base)
        if name in SCATTERS:
            scatter, names = SCATTERS[name]
            place = tuple(args[each] for each in names)
            whole = name == "slice" and place[1:] in WHOLE
            return value if whole else self._emit(scatter, (base, value, *place), base)
        raise CaptureError(
            f"the model writes in place into what {name!r} has made, which shares memory with "
            f"another tensor; use operators that are not in place there"
        )

    def _scattered_part(self, part: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        source, index = part.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        dim = named_args(source).get("dim", 0)
        if aten_name(source) == "unbind":
            return self._emit(aten.select_scatter.default, (base, value, dim, index), base)
        sizes = [each.shape[dim] for each in source.meta["val"]]
        start = sum(sizes[:index])
        place = dim, start, start + sizes[index], 1
        return self._emit(aten.slice_scatter.default, (base, value, *place), base)

    def _emit(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A new node whose result is like that of another."""
        kwargs = dict(like.kwargs) if like.target is target else {}
        node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(like.meta)
        return node


def _check_writes(node: fx.Node) -> None:
    """Refuses operators that write into other arguments than the one they are named for."""
    if node.op == "call_function" and aten_name(node) == "native_batch_norm":
        raise CaptureError(
            "the model calls 'native_batch_norm', which writes into its statistics; use "
            "torch.nn.functional.batch_norm"
        )
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments[is_in_place(node) :] if schema is not None else ()
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            raise CaptureError(
                f"the model calls {aten_name(node, strip=False)!r}, which writes into its argument "
                f"{argument.name!r}; use an operator that returns its results"
            )


def _parent(node: fx.Node) -> fx.Node | None:
    """The tensor whose memory this one looks into; that of a part is what was split."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or is_in_place(node) or node.target is COPY:
        return None
    if node.target is operator.getitem:
        source = source.args[0] if source.args else None
        if not isinstance(source, fx.Node):
            return None
    value, of = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(of, torch.Tensor):
        return None
    return source if value.untyped_storage()._cdata == of.untyped_storage()._cdata else None
