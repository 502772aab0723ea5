"""Writes the pages of docs/reference that say what the code says: settings, commands, API, lists.

    python docs/generate.py

A test fails where a page is not what this writes.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from typer.models import OptionInfo

import shardwise
from shardwise import Settings, zoo
from shardwise.cli.app import app
from shardwise.cluster.cluster import Cluster, presets

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- written by docs/generate.py: edit the code instead -->"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


# -- settings --------------------------------------------------------------------------------------


def settings() -> str:
    lines = [
        "# Settings of a training run",
        NOTE,
        "",
        "`shardwise train` takes each as an option (`--lr-batch 256`), a YAML file as a field",
        "(`lr_batch: 256`), and code as an argument: `shardwise.Settings(lr_batch=256)`. An option",
        "counts more than the file. `options` is written `--option KEY=VALUE` on the command line;",
        "lists are written with commas (`--milestones 30,60`); a switch is turned off with `--no-`",
        "(`--no-report`).",
    ]
    panels: dict[str, list[list[str]]] = {}
    for name, field in Settings.model_fields.items():
        extra: Any = field.json_schema_extra
        row = [f"`{name}`", f"`{_kind(field.annotation)}`", _value(field.default)]
        panels.setdefault(extra["panel"], []).append([*row, field.description or ""])
    for panel, rows in panels.items():
        lines += ["", f"## {panel}", "", *table(["setting", "kind", "default", ""], rows)]
    return "\n".join([*lines, ""])


def _kind(annotation: Any) -> str:
    """How a value is written, in few words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if str(origin).startswith("typing.Annotated") or hasattr(annotation, "__metadata__"):
        return _kind(args[0])
    if str(origin) == "typing.Literal":
        return " ".join(args)
    if origin is tuple:
        return "list of " + _kind(args[0])
    if origin is dict:
        return "mapping"
    known = [arg for arg in args if arg is not type(None)]
    if known:
        return _kind(known[0])
    names = {int: "whole number", float: "number", bool: "true false", str: "text"}
    return names.get(annotation, str(annotation))


def _value(default: Any) -> str:
    if default is None or default in ("", (), {}):
        return ""
    text = list(default) if isinstance(default, tuple) else default
    return f"`{json.dumps(text) if not isinstance(text, str) else text}`"


# -- commands --------------------------------------------------------------------------------------


def commands() -> str:
    lines = [
        "# Commands",
        NOTE,
        "",
        "Every command is a call of the library. Exit code 0: done; 1: `verify` found a",
        "difference; 2: a mistake in what was asked for, said in one line; 3: a worker failed.",
        "`python -m shardwise` is the same as `shardwise`.",
    ]
    for command in app.registered_commands:
        callback: Any = command.callback
        name = command.name or callback.__name__
        lines += ["", f"## shardwise {name}", "", _paragraphs(callback.__doc__ or "")]
        if name == "train":
            lines += ["", "Every option is a [setting](settings.md), which a YAML file may hold."]
        else:
            rows = [_parameter_row(*found) for found in _typed(callback)]
            lines += ["", *table(["", "", "default"], rows)]
    return "\n".join([*lines, ""])


def _typed(callback: Any) -> list[tuple[inspect.Parameter, Any, Any]]:
    """Every parameter of a command, its kind, and what typer is told about it."""
    hints = get_type_hints(callback, include_extras=True)
    found = []
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, info = get_args(hints[name])[:2]
        found.append((parameter, kind, info))
    return sorted(found, key=lambda each: isinstance(each[2], OptionInfo))


def _parameter_row(parameter: inspect.Parameter, kind: Any, info: Any) -> list[str]:
    default = parameter.default
    if not isinstance(info, OptionInfo):
        name = (info.metavar or parameter.name.upper()).strip("[]")
        return [f"`{name}`" if default is parameter.empty else f"`[{name}]`", _text(info.help), ""]
    named = [str(text) for text in (info.default, *(info.param_decls or ()))]
    usual = f"--{parameter.name.replace('_', '-')}"
    flag = next((text for text in named if text.startswith("--")), usual)
    if kind is bool:
        return [f"`{flag}`", _text(info.help), ""]
    word = info.metavar or _word(kind)
    shown = "" if default is None else f"`{default}`"
    return [f"`{flag} {word}`", _text(info.help), "required" if shown.count("empty") else shown]


def _word(kind: Any) -> str:
    """What stands for a value of this kind."""
    text = str(kind)
    words = {"int": "N", "float": "NUMBER", "Path": "FILE"}
    return next((word for name, word in words.items() if name in text), "TEXT")


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def _paragraphs(text: str) -> str:
    return "\n\n".join(_text(part) for part in inspect.cleandoc(text).split("\n\n"))


# -- the API ---------------------------------------------------------------------------------------


def api() -> str:
    lines = [
        "# Public names",
        NOTE,
        "",
        "What `import shardwise` offers; all else may change. Mistakes raise",
        "`shardwise.ShardwiseError`, with one sentence that names the layer, field or file.",
    ]
    for name in sorted(shardwise.__all__, key=str.lower):
        thing = getattr(shardwise, name)
        lines += ["", f"## `{name}`", "", *_described(name, thing)]
    lines += ["", "## `shardwise.checkpoint`", ""]
    from shardwise import checkpoint

    for name in checkpoint.__all__:
        lines += ["", f"### `checkpoint.{name}`", "", *_described(name, getattr(checkpoint, name))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, ""]))


def _described(name: str, thing: Any) -> list[str]:
    if isinstance(thing, str):
        return ["The version of this package, as text."]
    doc = _first(thing.__doc__)
    if inspect.ismodule(thing):
        rows = [[f"`{each}`", _summary(getattr(thing, each))] for each in thing.__all__]
        return [doc, "", *table(["name", ""], rows)]
    lines = [doc]
    if name == "Settings":
        lines += ["", "Its fields are [the settings of a run](settings.md)."]
    elif inspect.isfunction(thing) or is_dataclass(thing) or name in ("Trainer", "Checkpoints"):
        lines += ["", "```text", _signature(name, thing), "```"]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        rows = [[f"`{member}`", _summary(value)] for member, value in _members(thing)]
        if rows:
            lines += ["", *table(["member", ""], rows)]
    return lines


def _summary(thing: Any) -> str:
    """The first paragraph of what it says about itself; data says nothing."""
    is_data = not (callable(thing) or isinstance(thing, (property, cached_property)))
    return "" if is_data else _first(thing.__doc__).split("\n\n")[0]


def _members(thing: type) -> list[tuple[str, Any]]:
    """Public methods and properties, of our own base classes too, that say what they are for."""
    found = []
    bases = [cls for cls in reversed(thing.__mro__) if cls.__module__.startswith("shardwise")]
    members = {name: value for cls in bases for name, value in vars(cls).items()}
    for name, value in members.items():
        value = getattr(value, "__func__", value)
        is_member = isinstance(value, (property, cached_property)) or inspect.isfunction(value)
        if is_member and not name.startswith("_") and value.__doc__:
            found.append((name, value))
    return found


def _first(doc: str | None) -> str:
    """The docstring without its examples."""
    text = inspect.cleandoc(doc or "").split(">>>")[0].strip()
    return "\n\n".join(_text(part) for part in text.split("\n\n"))


def _signature(name: str, thing: Any) -> str:
    """One argument per line, with the names of types as they are written."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return f"{name}(...)"
    parts, seen_star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_star:
            parts.append("*")
            seen_star = True
        seen_star |= parameter.kind is parameter.VAR_POSITIONAL
        parts.append(_parameter(parameter))
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= 96 else f"{name}(\n" + "".join(f"    {p},\n" for p in parts) + ")"


def _parameter(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    kind = "" if annotation is parameter.empty else f": {_type_name(annotation)}"
    default = parameter.default
    value = "" if default is parameter.empty else f" = {_shown(default)}"
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return f"{star}{parameter.name}{kind}{value}"


def _shown(default: Any) -> str:
    return default.__name__ if callable(default) else re.sub(r"<(\w+)[^>]*>", r"\1", repr(default))


def _type_name(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)


# -- lists -----------------------------------------------------------------------------------------

PAPERS = [
    "P1: Barrachina, Dolz, San Juan, Quintana-Ort\u00ed: Efficient and portable GEMM-based "
    "convolution operators for deep neural network training on multicore processors (2022)",
    "P2: Dryden, Maruyama, Moon, Benson, Snir, Van Essen: Channel and filter parallelism for "
    "large-scale CNN training (2019)",
    "P3: Lee, Jha, Agrawal, Choudhary, Liao: Parallel deep convolutional neural network training "
    "by exploiting the overlapping of computation and communication (PCNN)",
    "P4: Exploring the hidden dimension in accelerating convolutional neural networks (DeePa)",
    "P5: Li, Fang, Fu and others: swCaffe, a parallel framework for accelerating deep learning "
    "applications on Sunway TaihuLight",
]


def lists() -> str:
    lines = [
        "# Networks and clusters that come along",
        NOTE,
        "",
        "## Networks",
        "",
        "`shardwise.zoo.build(NAME, num_classes=...)`, or the name where a command wants a MODEL.",
        "P1 to P5 are the papers that use them, see below.",
        "",
    ]
    rows = [
        [f"`{e.name}`", "x".join(map(str, e.input_shape)), str(e.num_classes), e.source]
        for e in map(zoo.entry, zoo.names())
    ]
    lines += table(["name", "one sample", "classes", "used by"], rows)
    lines += ["", "## Clusters", "", "For `--cluster`, and `cluster=` in code.", ""]
    found = [_cluster_row(name) for name in presets()]
    lines += table(["name", "workers", "flop/s of a worker", "memory of a worker", "links"], found)
    lines += ["", "## Papers", "", *(f"- {paper}" for paper in PAPERS)]
    return "\n".join([*lines, ""])


def _cluster_row(name: str) -> list[str]:
    written = yaml.safe_load(presets()[name].read_text())
    cluster, device = Cluster.load(name), written["device"]
    links = ", ".join(f"{link['name']} {link['bandwidth']}" for link in written["links"])
    open_end = cluster.links[-1].count is None
    workers = "as many as asked for" if open_end else str(cluster.world)
    return [f"`{name}`", workers, str(device["flops"]), str(device["memory"]), links]


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "commands.md": commands,
    "api.md": api,
    "lists.md": lists,
}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (FOLDER / page).write_text(write())
        print(f"written: {FOLDER / page}")
