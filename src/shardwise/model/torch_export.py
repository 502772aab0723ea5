"""From an nn.Module to a LayerGraph, through torch.export."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn
from torch.export import _trace as torch_trace

from shardwise.errors import CaptureError, ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.attribute_reads import read_attributes
from shardwise.model.attribute_values import Reads
from shardwise.model.attribute_writes import Left, left_behind
from shardwise.model.build import Builder
from shardwise.model.composites import taken_apart
from shardwise.model.exported import Exported, Numbers, Shapes
from shardwise.model.hooks import traced_hooks
from shardwise.model.own_backward import kept_whole
from shardwise.model.regions import without_inference_mode
from shardwise.model.source_lines import line_of_error
from shardwise.model.weightless import stand_ins
from shardwise.tensors import autocast_to, like

Tensors = tuple[torch.Tensor, ...]
UNKNOWN_OUTPUT = re.compile(r"Found <class '(?:[\w<>]+\.)*(\w+)'> in output")
SPECIAL = (0, 1)  # sizes that torch's operators may treat otherwise than larger ones
LOGGERS = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
MOST_GRAPHS = 8  # that are kept: a model may be given inputs of any number of sizes
MOST_EXPORTS = 8  # likewise: of images of one row, of two, ...

Sizes = int | Shapes  # of all inputs, or so many samples of those that were given first
Free = Literal["samples", "sizes"]  # what may differ from the sizes that a model is exported for


def _as_arguments(model: nn.Module, values: list[Any]) -> tuple[Any, ...]:
    """One value per input, as the arguments of forward: those of a `*args` belong together."""
    for place, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return (*values[:place], tuple(values[place:]))
    return tuple(values)


def shapes_of(inputs: Tensors) -> Shapes:
    return tuple(tuple(x.shape) for x in inputs)


def as_sizes(batch: Any, num_inputs: int) -> Sizes:
    """What a user says of the whole inputs: so many samples, the shape of the one, or of all."""
    if isinstance(batch, int) and not isinstance(batch, bool) and batch >= 0:
        return batch
    if isinstance(batch, (tuple, list)):
        shapes = batch if all(isinstance(part, (tuple, list)) for part in batch) else [batch]
        sizes = [size for shape in shapes for size in shape]
        if len(shapes) == num_inputs and all(type(size) is int and size >= 0 for size in sizes):
            return tuple(map(tuple, shapes))
    raise ShardwiseError(
        f"batch={batch!r} must be the number of samples of all parts, or the shapes of the whole "
        "inputs"
    )


def with_samples(shapes: Shapes, samples: int) -> Shapes:
    """The same inputs with so many samples; those with other rows than the first have none."""
    return tuple((samples, *s[1:]) if s[0] == shapes[0][0] else s for s in shapes)


class Captured:
    """A model in one mode; gives its layer graph for inputs of any sizes that it takes.

    It is exported for the sizes that it is first given, with a free number of samples, and once
    more, with all sizes free, when others come. Where it then makes other calls, for images of one
    row say, it is exported for these sizes, too. `noted` is told what each export has read and left
    in attributes of modules.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensors,
        training: bool,
        others: tuple[str, ...] = (),
        autocast: torch.dtype | None = None,
        sizes_vary: bool = False,
        noted: Callable[[Reads, Left], None] = lambda reads, left: None,
    ) -> None:
        check_example(model, inputs)
        self.training, self._given, self._noted = training, (model, inputs), noted
        self._others, self._autocast = others, autocast  # modules in another mode, and types
        self._shapes, self._sizes_vary = shapes_of(inputs), sizes_vary
        self._exports: list[Exported] = []  # the last made is last
        self._graphs: dict[Shapes, LayerGraph] = {}  # the last used is last
        self._lock = threading.Lock()
        self._fitting(self._shapes)  # what cannot be captured is said at once

    def graph(self, sizes: Sizes) -> LayerGraph:
        """The layer graph for inputs of these shapes, or for so many samples of those it knows."""
        shapes = with_samples(self._shapes, sizes) if isinstance(sizes, int) else sizes
        with self._lock:  # a loader asks beside the pass that runs
            graph = self._graphs.pop(shapes, None) or self._build(shapes)
            self._graphs[shapes] = graph
            while len(self._graphs) > MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return graph

    def _build(self, shapes: Shapes) -> LayerGraph:
        return Builder(*self._fitting(shapes), shapes[0][0], self.training).build()

    def _fitting(self, shapes: Shapes) -> tuple[Exported, Numbers]:
        """An export whose calls are those for such inputs, and what is free in it."""
        for exported in self._exports:
            numbers = exported.numbers(shapes)
            if numbers is not None:
                return exported, numbers
        exported = self._exported(shapes)
        numbers = exported.numbers(shapes, is_alike=True)
        assert numbers is not None, shapes
        self._exports = [*self._exports, exported][-MOST_EXPORTS:]
        return exported, numbers

    def _exported(self, shapes: Shapes) -> Exported:
        """The model exported for such inputs.

        Batch norm refuses one value, which it says when it runs: one sample is shown as two then.
        """
        known = with_samples(self._shapes, shapes[0][0])
        free = "sizes" if self._sizes_vary or shapes != known else "samples"
        try:
            return self._export(shapes, free)
        except CaptureError:
            if shapes[0][0] in SPECIAL:
                with suppress(CaptureError):
                    several = self._export(with_samples(shapes, 2), "samples")
                    if several.numbers(shapes, is_alike=True) is not None:
                        return several
            raise

    @torch.inference_mode(False)  # a new size may come when a model is used for inference
    def _export(self, shapes: Shapes, free: Free) -> Exported:
        model, given = self._given
        shaped = zip(given, shapes, strict=True)
        same = [tuple(x.shape) == shape and not x.is_inference() for x, shape in shaped]
        shaped = zip(given, shapes, same, strict=True)
        inputs = tuple(x if is_same else like(x, shape) for x, shape, is_same in shaped)
        model, inputs = _twin(model, inputs)
        with (
            _mode(model, self.training, self._others),
            traced_hooks(model),
            read_attributes(model) as reads,
            left_behind(model, reads) as left,
            autocast_to(inputs[0].device.type, self._autocast),
        ):
            program = _export(model, inputs, free)
        self._noted(reads, left)
        return Exported(program, model, left)


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
    """Torch logs a traceback of a shape that does not fit, before it raises: ours is a sentence.

    So it is where forward leaves a tensor in an attribute, and somebody needs it.
    """
    loggers = [logging.getLogger(f"torch.{name}") for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    torch_trace.__dict__["print"] = lambda *_, **__: None  # of half a graph
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attribute")
            yield
    finally:
        torch_trace.__dict__.pop("print", None)
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _export(model: nn.Module, inputs: Tensors, free: Free) -> torch.export.ExportedProgram:
    """The model as a graph of calls, with free sizes unless it accepts these only."""
    try:
        with torch.enable_grad(), kept_whole(), without_inference_mode(), _silent():
            for apart in (True, False):
                with suppress(Exception), taken_apart(apart):
                    sizes = _as_arguments(model, _free_sizes(shapes_of(inputs), free))
                    marked = tuple(like(x, tuple(x.shape)) for x in inputs)  # by export, for ever
                    program = torch.export.export(model, marked, dynamic_shapes=sizes, strict=False)
                    if _is_free(program):
                        return program
            with suppress(Exception), taken_apart():
                return torch.export.export(model, inputs, strict=False)
            return torch.export.export(model, inputs, strict=False)
    except Exception as error:
        shapes = ", ".join("x".join(map(str, x.shape)) for x in inputs)
        raise CaptureError(
            f"{type(model).__name__} cannot be captured for input {shapes}: {_reason(error)}"
        ) from error


def _free_sizes(shapes: Shapes, free: Free) -> list[dict[int, Any]]:
    """Which dimensions of each input may have other sizes; those of 0 or 1 are special to torch.

    Inputs with another number of rows than the first have no samples.
    """
    return [
        {
            dim: torch.export.Dim.AUTO
            for dim, size in enumerate(shape if free == "sizes" else shape[:1])
            if size not in SPECIAL and (free == "sizes" or size == shapes[0][0])
        }
        for shape in shapes
    ]


def _is_free(program: Any) -> bool:
    """Whether an exported model accepts other sizes."""
    values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    return any(isinstance(size, torch.SymInt) for value in values for size in value.shape)


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
