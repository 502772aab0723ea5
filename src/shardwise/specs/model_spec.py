"""What a user writes for a model, its inputs and its options, and what it stands for."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwise import zoo
from shardwise.caffe.net import CaffeNet
from shardwise.errors import ShardwiseError, one_line
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import capture
from shardwise.units import is_count

Shapes = tuple[tuple[int, ...], ...]
CAFFE = ".prototxt"  # how the file of a net ends


@dataclass(frozen=True)
class ModelSpec:
    """A model by name: what builds it, with which options, and for which inputs.

    >>> ModelSpec("digits", batch=4).input_shapes(default_batch=64)
    ((4, 1, 8, 8),)
    """

    model: str
    shapes: Shapes = ()  # of all inputs, samples first; where there are none, the zoo's
    batch: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ShardwiseError(f"batch {self.batch}: there must be at least 1 sample")

    def build(self) -> nn.Module:
        if self.model.endswith(CAFFE) and self.shapes:
            return _build_caffe(self.model, {"shape": self.shapes[0][1:], **self.options})
        return load_model(self.model, **self.options)

    def input_shapes(self, default_batch: int) -> Shapes:
        """The shapes that are given, or those of so many samples of a zoo network."""
        if not self.shapes:
            if self.model.endswith(CAFFE):
                with torch.device("meta"):
                    inputs = _build_caffe(self.model, dict(self.options)).inputs
                return tuple((self.batch or default_batch, *each.shape[1:]) for each in inputs)
            if ":" in self.model:
                raise ShardwiseError(
                    f"the input shape of {self.model!r} is not known; give one: 2x3x224x224, say"
                )
            return ((self.batch or default_batch, *_zoo_entry(self.model).input_shape),)
        if self.batch is not None and any(shape[0] != self.batch for shape in self.shapes):
            raise ShardwiseError(
                f"--batch {self.batch} does not agree with the input of {self.shapes[0][0]} samples"
            )
        return self.shapes

    def graph(
        self, default_batch: int, training: bool = True, sizes_vary: bool = False
    ) -> LayerGraph:
        """The model's layers; its weights are never made."""
        shapes = self.input_shapes(default_batch)
        with torch.device("meta"):
            model = self.build()
        inputs = [torch.empty(shape, device="meta") for shape in shapes]
        return capture(model, *inputs, training=training, sizes_vary=sizes_vary)


# -- models ----------------------------------------------------------------------------------------


def load_model(spec: str, **options: Any) -> nn.Module:
    """Builds the model of a zoo name, `package.module:callable`, `file.py:callable` or a Caffe net.

    >>> load_model("digits", width=8)[-1]
    Linear(in_features=64, out_features=10, bias=True)
    """
    if spec.endswith(CAFFE):
        return _build_caffe(spec, options)
    place, colon, name = spec.rpartition(":")
    if not colon:
        factory = _zoo_entry(spec).build
    else:
        target = _attribute(_load_module(place), place, name)
        if isinstance(target, nn.Module) and not options:
            return target
        if not callable(target) or isinstance(target, nn.Module):
            kind = type(target).__name__
            raise ShardwiseError(f"{spec!r} is a {kind}, not a callable that builds a model")
        factory = target
    return _build(spec, factory, options)


def _build_caffe(path: str, options: Mapping[str, Any]) -> CaffeNet:
    unknown = set(options) - {"shape"}
    if unknown:
        raise ShardwiseError(f"{path!r} says all about its net, and has no option {min(unknown)!r}")
    return CaffeNet(path, **options)


def _zoo_entry(name: str) -> zoo.Entry:
    if name.endswith(".py") or "." in name:
        raise ShardwiseError(
            f"{name!r} does not say what builds the model: write {name + ':callable'!r}"
        )
    try:
        return zoo.entry(name)
    except ValueError as error:
        raise ShardwiseError(
            f"{error} Or write file.py:callable or package.module:callable."
        ) from None


def _build(spec: str, factory: Any, options: dict[str, Any]) -> nn.Module:
    try:
        model = factory(**options)
    except Exception as error:
        raise ShardwiseError(f"building {spec!r} failed with {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ShardwiseError(f"{spec!r} built a {type(model).__name__}, not a torch.nn.Module")
    return model


def _load_module(place: str) -> ModuleType:
    """The module of a file or of a dotted name."""
    is_file = place.endswith(".py")
    path = Path(place).resolve()
    if is_file and not path.is_file():
        raise ShardwiseError(f"the model file {place!r} does not exist")
    folder = str(path.parent) if is_file else str(Path.cwd())
    if folder not in sys.path:  # as for a script: what lies beside it can be imported
        sys.path.insert(0, folder)
    try:
        return _run_file(path) if is_file else importlib.import_module(place)
    except Exception as error:
        raise ShardwiseError(f"{place!r} cannot be imported: {one_line(error)}") from error


def _run_file(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up
    found.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    public = [known for known in vars(module) if not known.startswith("_")]
    close = get_close_matches(name, public, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ShardwiseError(f"{place!r} has no {name!r}{hint}")


# -- shapes and options ----------------------------------------------------------------------------


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape, samples first.

    >>> parse_shape("2x3x224x224")
    (2, 3, 224, 224)
    """
    sizes = text.lower().split("x")
    for dim, size in enumerate(sizes):
        if not is_count(size):
            raise ShardwiseError(
                f"input shape {text!r}: dimension {dim} is {size!r}, and must be a whole number "
                f"of at least 1, as in 2x3x224x224"
            )
    return tuple(map(int, sizes))


def parse_size(text: str) -> Shapes:
    """The shapes of all inputs, where a model has several with commas between them.

    >>> parse_size("1x4x64x64"), parse_size("1x4x96x96,1x77")
    (((1, 4, 64, 64),), ((1, 4, 96, 96), (1, 77)))
    """
    return tuple(map(parse_shape, text.split(",")))


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments for a model's builder; what is not a Python literal is a string.

    >>> parse_options(["width=8", "norm=batch"])
    {'width': 8, 'norm': 'batch'}
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ShardwiseError(f"option {text!r} must be written key=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options
