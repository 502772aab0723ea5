"""From an nn.Module to a LayerGraph, through torch.export."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import _trace as torch_trace

from shardwise.errors import CaptureError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.attribute_values import EVERYTHING, inside, is_object
from shardwise.model.attribute_writes import left_behind
from shardwise.model.build import Builder
from shardwise.model.hooks import traced_hooks
from shardwise.model.in_place import functional
from shardwise.model.own_backward import kept_whole
from shardwise.model.regions import joined, without_inference_mode
from shardwise.model.source_lines import line_of_error
from shardwise.model.weightless import stand_ins
from shardwise.modules import named_tensors
from shardwise.tensors import autocast_to, like

Tensors = tuple[torch.Tensor, ...]
UNKNOWN_OUTPUT = re.compile(r"Found <class '(?:[\w<>]+\.)*(\w+)'> in output")
SPECIAL = (0, 1)  # batches that torch's operators may treat otherwise than larger ones
LOGGERS = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
MOST_GRAPHS = 8  # that are kept: a model may be given any number of batch sizes


def _as_arguments(model: nn.Module, values: list[Any]) -> tuple[Any, ...]:
    """One value per input, as the arguments of forward: those of a `*args` belong together."""
    for place, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return (*values[:place], tuple(values[place:]))
    return tuple(values)


class Captured:
    """A model exported once in one mode; gives its layer graph for any batch size."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensors,
        training: bool,
        free: bool = True,
        others: tuple[str, ...] = (),
        autocast: torch.dtype | None = None,
    ) -> None:
        check_example(model, inputs)
        self.training, self._given = training, (model, inputs)
        self._others, self._autocast = others, autocast  # modules in another mode, and types
        model, inputs = _twin(model, inputs)
        self._modules = dict(model.named_modules())
        self._fixed_batch = inputs[0].shape[0]
        with (
            _mode(model, training, others),
            traced_hooks(model),
            read_attributes(model) as self.reads,
            left_behind(model, self.reads) as self.left,
            autocast_to(inputs[0].device.type, autocast),
        ):
            program = _export(model, inputs, free)
        self._names = _stored_names(program, model)
        constants = [name for kind, name in self._names.values() if kind == "constant"]
        self.constants = {name: program.constants[name] for name in constants}
        _check_constants(self.constants)
        kept = {n: name for n, (kind, name) in self._names.items() if kind != "constant"}
        graph = joined(program.graph_module)
        user_inputs = program.graph_signature.user_inputs  # made anew whenever it is asked for
        self._nodes = list(functional(graph, kept, user_inputs).nodes)
        self.output_spec = program.call_spec.out_spec
        self._user_inputs = [n for n in self._nodes if n.name in user_inputs]
        sizes = [size for node in self._user_inputs for size in node.meta["val"].shape]
        free_sizes = [size for size in sizes if isinstance(size, torch.SymInt)]
        self._symbols = {symbol for size in free_sizes for symbol in size.node.expr.free_symbols}
        self._graphs: dict[int, LayerGraph] = {}  # the last used is last
        self._lock = threading.Lock()

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
        with self._lock:  # a loader asks beside the pass that runs
            graph = self._graphs.pop(batch, None) or self._build(batch)
            self._graphs[batch] = graph
            while len(self._graphs) > MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return graph

    def _build(self, batch: int) -> LayerGraph:
        special = batch in SPECIAL and self.batch_is_free
        return (self._by_itself(batch) if special else None) or Builder(self, batch).build()

    def _by_itself(self, batch: int) -> LayerGraph | None:
        """The graph of one sample or of none, captured by itself.

        Models may treat these in another way (squeeze, say), of which the others know nothing. None
        where it cannot be captured: batch norm refuses one value, which it says when it runs.
        """
        model, inputs = self._given
        few = [x[:batch] if x.shape[0] == self._fixed_batch else x for x in inputs]
        try:
            settings = {"others": self._others, "autocast": self._autocast}
            alone = Captured(model, tuple(few), self.training, free=False, **settings)
            graph = alone.graph(batch)
        except CaptureError:
            return None
        return replace(graph, batch_is_free=True)


def check_example(model: nn.Module, inputs: Tensors) -> None:
    """Raises where a model and an example of its input cannot be captured at all."""
    if not inputs or not all(isinstance(x, torch.Tensor) and x.ndim for x in inputs):
        raise CaptureError("the example input must be tensors whose first dimension is samples")
    check_not_parallel(model)


def check_not_parallel(model: nn.Module) -> None:
    """Raises where a model, or a part of it, is parallel: its passes are messages to others."""
    for name, module in model.named_modules():
        if "_shardwise" in vars(module):
            what = f"its module {name!r}" if name else "it"
            raise CaptureError(f"the model cannot be made parallel: {what} is parallel already")


def _check_constants(constants: dict[str, torch.Tensor]) -> None:
    for name, tensor in constants.items():
        if tensor.requires_grad:
            raise CaptureError(
                f"forward uses the tensor {name!r}, which requires gradients and is no parameter: "
                "make it one (nn.Parameter), or detach it"
            )


def _twin(model: nn.Module, inputs: Tensors) -> tuple[nn.Module, Tensors]:
    """A copy with the same tensors: torch.export replaces attributes of what it is given.

    Where only some tensors have values, others stand for those that have none.
    """
    tensors = [*inputs, *model.parameters(), *model.buffers()]
    twins = stand_ins(tensors)
    memo = {id(tensor): twin for tensor, twin in zip(tensors, twins, strict=True)}
    try:
        return copy.deepcopy(model, memo), tuple(twins[: len(inputs)])
    except Exception:  # attributes that cannot be copied are mostly left alone, too
        return model, inputs


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


@contextmanager
def _mode(model: nn.Module, training: bool, others: tuple[str, ...]) -> Iterator[None]:
    """Modules in their modes, and momentum=None (which reads a counter) out of the way."""
    flags = {module: module.training for module in model.modules()}
    cumulative = [m for m in model.modules() if getattr(m, "momentum", 0.1) is None]
    try:
        for name, module in model.named_modules():
            module.training = training != (name in others)
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
    loggers = [logging.getLogger(f"torch.{name}") for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    torch_trace.__dict__["print"] = lambda *_, **__: None  # of half a graph
    try:
        yield
    finally:
        torch_trace.__dict__.pop("print", None)
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _export(model: nn.Module, inputs: Tensors, may_be_free: bool) -> Any:
    # A batch of one would be taken for a constant, so one sample is shown as two. Inputs with
    # another number of rows than the first have no samples.
    samples = inputs[0].shape[0]
    batch = max(2, samples)
    has_samples = [x.shape[0] == samples for x in inputs]
    examples = tuple(
        like(x, (batch, *x.shape[1:])) if has else x
        for x, has in zip(inputs, has_samples, strict=True)
    )
    free = [{0: torch.export.Dim.AUTO} if has else {} for has in has_samples]
    shapes = _as_arguments(model, free)
    try:
        with torch.enable_grad(), kept_whole(), without_inference_mode(), _silent():
            if not may_be_free:
                return torch.export.export(model, inputs, strict=False)
            with suppress(Exception):  # a model may accept this batch size only
                program = torch.export.export(model, examples, dynamic_shapes=shapes, strict=False)
                values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
                is_free = any(isinstance(s, torch.SymInt) for v in values for s in v.shape)
                if is_free or batch == samples:
                    return program
            return torch.export.export(model, inputs, strict=False)
    except Exception as error:
        shapes = ", ".join("x".join(map(str, x.shape)) for x in inputs)
        raise CaptureError(
            f"{type(model).__name__} cannot be captured for input {shapes}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """Why torch.export has failed, in a sentence, and in which line of the model."""
    reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
    unknown = UNKNOWN_OUTPUT.search(reason)
    if unknown:
        reason = (
            f"it returns a {unknown[1]}, of which torch.export does not know the parts; call "
            "torch.export.register_dataclass of that class before, or return a tuple or dict"
        )
    if "data-dependent expression" in reason:
        reason = (
            "it depends on the values of tensors (an if, a loop, int() or the like), which are "
            "only known when it runs"
        )
    line = line_of_error(error)
    return f"{reason.strip()}{f' ({line})' if line else ''}"


# -- what forward reads meanwhile: attributes of modules, and of objects that they hold ------------


_lock = threading.Lock()
_set = nn.Module.__setattr__
_noted: dict[int, set[str]] = {}  # names that are read, by the module that is being captured
_written: dict[int, set[str]] = {}  # names that were set before, of which nobody reads the old
# By the class of objects: names for everyone who captures, and what the class had itself.
_patched: dict[type, tuple[list[set[str]], Any]] = {}


@contextmanager
def read_attributes(model: nn.Module) -> Iterator[dict[Any, set[str]]]:
    """Within, every attribute of the model's modules that is read is noted, by their paths.

    What forward itself has set before is not what it depends on. Attributes of other objects that
    modules hold are noted by their classes.
    """
    named = dict(model.named_modules())
    reads: dict[Any, set[str]] = defaultdict(set, {path: set() for path in named})
    own = {id(module): reads[path] for path, module in named.items()}
    held = [value for module in named.values() for value in vars(module).values()]
    kinds = {type(value) for value in inside(held) if is_object(value)}
    with _lock:
        _noted.update(own)
        _written.update((key, set()) for key in own)
        nn.Module.__getattribute__ = _read  # type: ignore[method-assign]
        nn.Module.__setattr__ = _write  # type: ignore[method-assign]
        watched = [kind for kind in kinds if _watch(kind, reads[kind])]
    try:
        yield reads
    finally:
        with _lock:
            for key in own:
                _noted.pop(key, None)
                _written.pop(key, None)
            if not _noted:
                del nn.Module.__getattribute__
                nn.Module.__setattr__ = _set  # type: ignore[method-assign]
            for kind in watched:
                _leave(kind, reads[kind])


def _read(self: Any, name: str) -> Any:
    own = _noted.get(id(self))
    if own is not None and name not in _written[id(self)]:
        own.add(name)
    return object.__getattribute__(self, name)


def _write(self: Any, name: str, value: Any) -> None:
    own = _written.get(id(self))
    if own is not None:
        own.add(name)
    _set(self, name, value)


def _watch(kind: Any, names: set[str]) -> bool:
    """From now on names that are read of objects of this class are noted, if it allows that."""
    if kind in _patched:
        _patched[kind][0].append(names)
        return True
    original, takers = kind.__getattribute__, [names]

    def read(self: Any, name: str) -> Any:
        for taker in takers:
            taker.add(name)
        return original(self, name)

    before = vars(kind).get("__getattribute__")
    try:
        kind.__getattribute__ = read
    except TypeError:  # of a class that is not written in Python
        names.add(EVERYTHING)
        return False
    _patched[kind] = takers, before
    return True


def _leave(kind: Any, names: set[str]) -> None:
    takers, before = _patched[kind]
    takers[:] = [taker for taker in takers if taker is not names]
    if takers:
        return
    del _patched[kind]
    if before is None:
        del kind.__getattribute__
    else:
        kind.__getattribute__ = before
