"""What a user may write for a model, a shape or a split, and what is said when it is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.geometry.split_text import parse_split
from shardwise.specs.model_spec import (
    ModelSpec,
    load_model,
    parse_options,
    parse_shape,
)

SOURCE = """
from dataclasses import dataclass
from torch import nn
from beside import WIDTH

@dataclass
class Sizes:
    width: int = WIDTH

def build(width=Sizes().width):
    return nn.Linear(width, 2)

def fails():
    raise RuntimeError("no weights\\nand more")

def number():
    return 3

ready = nn.Linear(1, 1)
constant = 3
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mynet.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("WIDTH = 5")
    (tmp_path / "broken.py").write_text("def f(:")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("mynet", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(tmp_path / "mynet.py")


def test_zoo_names_modules_and_files_build_models(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(load_model("digits"), nn.Sequential)
    assert isinstance(load_model("shardwise.zoo.digits:digits"), nn.Sequential)
    assert isinstance(load_model(f"{source}:build"), nn.Linear)
    assert isinstance(load_model(f"{source}:ready"), nn.Linear)
    monkeypatch.chdir(Path(source).parent)
    assert isinstance(load_model("mynet:build"), nn.Linear)


def test_options_reach_the_builder(source: str) -> None:
    model = load_model(f"{source}:build", width=7)
    assert isinstance(model, nn.Linear) and model.in_features == 7
    classifier = list(load_model("digits", num_classes=3).modules())[-1]
    assert isinstance(classifier, nn.Linear) and classifier.out_features == 3


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("resnet51", "no network 'resnet51'; did you mean 'resnet50'"),
        ("nowhere.py:build", "the model file 'nowhere.py' does not exist"),
        ("FILE", "does not say what builds the model"),
        ("no_such_package.net:build", "cannot be imported: ModuleNotFoundError: No module named"),
        ("FOLDER/broken.py:f", "cannot be imported: SyntaxError"),
        ("FILE:biuld", "has no 'biuld'; did you mean 'build'?"),
        ("FILE:fails", "failed with RuntimeError: no weights$"),
        ("FILE:number", "built a int, not a torch.nn.Module"),
        ("FILE:constant", "is a int, not a callable"),
        ("FILE:", "has no ''"),
    ],
)
def test_a_wrong_model_is_one_sentence(source: str, spec: str, sentence: str) -> None:
    spec = spec.replace("FILE", source).replace("FOLDER", str(Path(source).parent))
    with pytest.raises(ShardwiseError, match=sentence) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ShardwiseError, match="'depth'"):
        load_model("digits", depth=3)


def test_shapes_splits_and_options_are_parsed() -> None:
    assert parse_shape("2x3x224x224") == (2, 3, 224, 224)
    assert parse_shape("7") == (7,)
    assert parse_split("n=2, h=3") == {"n": 2, "h": 3}
    assert parse_options(["width=8", "rate=0.5", "flag=True", "norm=batch"]) == {
        "width": 8,
        "rate": 0.5,
        "flag": True,
        "norm": "batch",
    }


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_shape, "2xx3", "dimension 1 is ''"),
        (parse_shape, "2x-3", "dimension 1 is '-3'"),
        (parse_shape, "0x3", "dimension 0 is '0'"),
        (parse_split, "x=2", "'x' is not an axis; the axes are n \\(samples\\)"),
        (parse_split, "n=2,n=2", "'n' is given twice"),
        (parse_split, "n", "n='' must be a whole number"),
        (parse_split, "h=two", "h='two' must be a whole number"),
        (parse_split, "", "'' is not an axis"),
        (parse_options, ["width"], "option 'width' must be written key=value"),
    ],
)
def test_a_wrong_shape_split_or_option_names_the_field(parse, text, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShardwiseError, match=sentence):
        parse(text)


def test_a_model_has_the_shapes_that_are_given_or_those_of_the_zoo() -> None:
    assert ModelSpec("digits").input_shapes(default_batch=6) == ((6, 1, 8, 8),)
    assert ModelSpec("digits", batch=4).input_shapes(default_batch=6) == ((4, 1, 8, 8),)
    with pytest.raises(ShardwiseError, match="give one"):
        ModelSpec("mynet.py:build").input_shapes(6)
    given = ModelSpec("digits", ((2, 1, 9, 9),), options={"width": 4})
    assert given.input_shapes(default_batch=6) == ((2, 1, 9, 9),)
    assert given.graph(6).batch == 2
    with pytest.raises(ShardwiseError, match="does not agree"):
        ModelSpec("digits", ((2, 1, 9, 9),), batch=4).input_shapes(6)
    with pytest.raises(ShardwiseError, match="batch 0: there must be at least 1 sample"):
        ModelSpec("digits", batch=0)
