"""The settings of a run as options of the command line: one per field, from its description."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.training.settings import Settings, read_settings

Command = Callable[[Settings], None]


def with_options(command: Command, name: str) -> Callable[..., None]:
    """A command of typer that takes a settings file and every setting, and calls `command`."""

    def call(config: Path | None, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        if "options" in given:
            from shardwise.specs.model_spec import parse_options

            given["options"] = parse_options(given["options"])
        command(read_settings(config, given))

    argument = Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.YAML]", help="Settings; options count more.")
    ]
    annotations = {"config": argument, **{name: _option(name) for name in Settings.model_fields}}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = annotations
    call.__doc__, call.__name__ = command.__doc__, name
    return call


def _option(name: str) -> Any:
    """The option of one setting; what it may be is checked by the settings themselves."""
    field = Settings.model_fields[name]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    flag = f"--{name.replace('_', '-')}"
    help_text = (field.description or "") + _default(field.default)
    common: dict[str, Any] = {
        "help": help_text,
        "rich_help_panel": extra["panel"],
        "show_default": False,
    }
    if name == "options":
        return Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", **common)]
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **common)]
    return Annotated[str | None, typer.Option(flag, metavar=_metavar(field), **common)]


def _metavar(field: Any) -> str:
    """How the value is written: as one of a few words, a number, numbers or text."""
    text = str(field.annotation)
    if "Literal" in text:
        return "|".join(field.annotation.__args__)
    if "tuple" in text:
        return "N,N"
    return "NUMBER" if "int" in text or "float" in text else "TEXT"


def _default(value: Any) -> str:
    if value is None or value in ("", (), {}) or isinstance(value, bool):
        return ""
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f" (default: {shown})"
