"""A model exported once: its calls, and the sizes of inputs for which they are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from shardwise.errors import CaptureError
from shardwise.model.composites import without_unused_parts
from shardwise.model.in_place import functional
from shardwise.model.regions import joined
from shardwise.modules import named_tensors

Shapes = tuple[tuple[int, ...], ...]  # of all inputs
Numbers = Mapping[sympy.Symbol, int]  # what sizes that are free amount to


class Exported:
    """The calls that a model makes, as nodes, and what stands in them for parameters and sizes.

    A size of an input is a number, or free: then it is a symbol, and numbers that depend on it are
    expressions. What the model compared on its way (`guards`) must come out the same.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, left: Mapping[Any, Any]
    ) -> None:
        self.modules = dict(model.named_modules())
        self.names = _stored_names(program, model)
        constants = [name for kind, name in self.names.values() if kind == "constant"]
        self.constants: dict[str, Any] = {name: program.constants[name] for name in constants}
        _check_constants(self.constants)
        kept = {n: name for n, (kind, name) in self.names.items() if kind != "constant"}
        user_inputs: Any = program.graph_signature.user_inputs  # made anew each time
        graph = without_unused_parts(joined(program.graph_module))
        graph = functional(graph, kept, user_inputs)
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.inputs = [node for node in self.nodes if node.name in user_inputs]
        self.output_spec = program.call_spec.out_spec
        self.left = left  # in attributes of modules, by forward
        self._sizes = [[_symbol(size) for size in n.meta["val"].shape] for n in self.inputs]
        free = [s for n in self.inputs for s in n.meta["val"].shape if isinstance(s, torch.SymInt)]
        environment = free[0].node.shape_env if free else None
        self._guards = [guard.expr for guard in environment.guards] if environment else []
        self._ranges = dict(environment.var_to_range) if environment else {}

    def numbers(self, shapes: Shapes, is_alike: bool = False) -> Numbers | None:
        """What free sizes amount to for inputs of these shapes; None where calls may be others.

        Sizes of 0 and 1 are others to torch, unless the model is known to treat them alike.
        """
        found: dict[sympy.Symbol, int] = {}
        for given, shape in zip(self._sizes, shapes, strict=True):
            if len(given) != len(shape):
                return None
            for size, asked in zip(given, shape, strict=True):
                if isinstance(size, sympy.Symbol):
                    found[size] = asked
                elif size != asked:
                    return None
        if is_alike or (self._within(found) and self._hold(found)):
            return found
        return None

    def _within(self, numbers: Numbers) -> bool:
        ranges = ((number, self._ranges.get(symbol)) for symbol, number in numbers.items())
        return all(known is None or known.lower <= n <= known.upper for n, known in ranges)

    def _hold(self, numbers: Numbers) -> bool:
        """Whether all that the model compared comes out as it did."""
        try:
            return all(evaluated(guard, numbers) for guard in self._guards)
        except (KeyError, ArithmeticError):  # of values, or of sizes that cannot be
            return False


def evaluated(expression: Any, numbers: Numbers) -> Any:
    """What an expression of free sizes amounts to; a KeyError where it has other symbols."""
    return sympy_interp(PythonReferenceAnalysis, numbers, expression)  # type: ignore[arg-type]


def _symbol(size: Any) -> Any:
    """A free size as its own symbol, even where it was found to equal another."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


def _check_constants(constants: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in constants.items():
        if tensor.requires_grad:
            raise CaptureError(
                f"forward uses the tensor {name!r}, which requires gradients and is no parameter: "
                "make it one (nn.Parameter), or detach it"
            )


def _stored_names(
    program: torch.export.ExportedProgram, model: nn.Module
) -> dict[str, tuple[str, str]]:
    """The kind and the name of every stored tensor, by the node that stands for it."""
    signature = program.graph_signature
    names: dict[int, str] = {}  # of tied ones the first, where torch.export takes the last
    first = {name: names.setdefault(id(tensor), name) for name, tensor in named_tensors(model)}
    kinds = {
        "param": signature.inputs_to_parameters,
        "buffer": signature.inputs_to_buffers,
        "constant": signature.inputs_to_lifted_tensor_constants,
    }
    return {
        node: (kind, first.get(name, name))
        for kind, mapping in kinds.items()
        for node, name in mapping.items()
    }
