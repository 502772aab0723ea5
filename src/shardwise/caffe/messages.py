"""Messages of prototxt files, checked against a table of what fields there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as

from .schema import MESSAGES
from .text_format import Field, Value, Word, parse_text

TRUTH = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
WANTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


@dataclass(frozen=True)
class FieldKind:
    """What a field may hold: `int`, `float`, `bool`, `str`, words of an enum, or a message."""

    kind: str
    repeated: bool
    default: Any

    @property
    def words(self) -> list[str]:
        return self.kind.split("|") if "|" in self.kind else []


@cache
def kinds(message: str) -> Mapping[str, FieldKind]:
    """The fields of a message.

    >>> kinds("PoolingParameter")["pool"].default
    'MAX'
    """
    return {name: _kind(text) for name, text in MESSAGES[message].items()}


def _kind(text: str) -> FieldKind:
    """From `float = 1`, `int*` (several) or `MAX|AVE = MAX`."""
    kind, _, default = text.partition(" = ")
    kind, repeated = kind.rstrip("*"), kind.endswith("*")
    if repeated:
        return FieldKind(kind, True, ())
    if not default:
        return FieldKind(kind, False, None)
    known = FieldKind(kind, False, None)
    return FieldKind(kind, False, _scalar(known, Word(default) if kind != "str" else default))


class ProtoMessage:
    """A message: fields by name, with their defaults, and where they stand.

    A message within that was not written is an empty one, unless it may stand several times.
    """

    def __init__(self, kind: str, file: str, line: int, fields: tuple[Field, ...] = ()) -> None:
        self.kind, self.file, self.line = kind, file, line
        self.written: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        for field in fields:
            self._add(field)

    def _add(self, field: Field) -> None:
        known = kinds(self.kind).get(field.name)
        place = f"{self.file}, line {field.line}"
        if known is None:
            close = get_close_matches(field.name, list(kinds(self.kind)), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ShardwiseError(f"{place}: {self.kind} has no field {field.name!r}{hint}")
        value = self._value(known, field, place)
        self.lines.setdefault(field.name, field.line)
        if known.repeated:
            self.written.setdefault(field.name, []).append(value)
        else:
            self.written[field.name] = value

    def _value(self, known: FieldKind, field: Field, place: str) -> Any:
        if known.kind in MESSAGES:
            if not isinstance(field.value, tuple):
                raise ShardwiseError(f"{place}: {field.name} must be a message in braces")
            return ProtoMessage(known.kind, self.file, field.line, field.value)
        value = _scalar(known, field.value)
        if value is None:
            wanted = WANTED.get(known.kind) or f"one of {', '.join(known.words)}"
            shown = field.value.text if isinstance(field.value, Word) else field.value
            shown = "{...}" if isinstance(shown, tuple) else shown
            raise ShardwiseError(f"{place}: {field.name} is {shown!r}, and must be {wanted}")
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.written:
            return self.written[name]
        known = kinds(self.kind)[name]
        if known.kind in MESSAGES and not known.repeated:
            return ProtoMessage(known.kind, self.file, self.line)
        return known.default

    def has(self, name: str) -> bool:
        """Whether a field was written."""
        return name in self.written

    def wrong(self, sentence: str, field: str | None = None) -> ShardwiseError:
        """An error that names the place of this message, or of a field of it."""
        line = self.line if field is None else self.lines.get(field, self.line)
        return ShardwiseError(f"{self.file}, line {line}: {sentence}")

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{n}={v!r}' for n, v in self.written.items())})"


def _scalar(known: FieldKind, value: Value) -> Any:
    """The value as a field of this kind has it; None where it cannot."""
    if known.kind == "str":
        return value if isinstance(value, str) else None
    if not isinstance(value, Word):
        return None
    text = value.text
    if known.kind == "bool":
        return TRUTH.get(text.lower())
    if known.words:
        names = known.words
        number = int(text) if text.isdigit() else -1
        return text if text in names else names[number] if 0 <= number < len(names) else None
    try:
        return int(text, 0) if known.kind == "int" else float(text.lower().removesuffix("f"))
    except ValueError:
        return None


def read_message(path: str | Path, kind: str) -> ProtoMessage:
    """The message of a prototxt file."""
    with system_errors_as(f"{str(path)!r} cannot be read"):
        content = Path(path).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ShardwiseError(f"{str(path)!r} is not text: a prototxt file is wanted") from None
    return ProtoMessage(kind, str(path), 1, parse_text(text, str(path)))
