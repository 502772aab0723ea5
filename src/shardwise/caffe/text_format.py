"""Protocol buffers' text format, as prototxt files are written in: fields with their lines."""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import dataclass
from typing import Union

from shardwise.errors import ShardwiseError

TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n,;]+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[-+]?[\w.]+(?:[-+]\d+)?)
      | (?P<mark>[{}<>:\[\]])""",
    re.VERBOSE,
)
CLOSING = {"{": "}", "<": ">"}
MAX_DEPTH = 50


@dataclass(frozen=True)
class Word:
    """A number, a truth value or the name of an enum's value, as written."""

    text: str


Value = Union[str, Word, "tuple[Field, ...]"]


@dataclass(frozen=True)
class Field:
    """One field of a message: text, a word, or the fields of a message within."""

    name: str
    value: Value
    line: int


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int


def parse_text(text: str, file: str) -> tuple[Field, ...]:
    """The fields of a message.

    >>> parse_text('name: "net"', "net.prototxt")
    (Field(name='name', value='net', line=1),)
    """
    return _Parser(_tokens(text, file), file).message("", 0)


def _tokens(text: str, file: str) -> list[Token]:
    found, position, line = [], 0, 1
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ShardwiseError(f"{file}, line {line}: {text[position]!r} cannot stand here")
        if match.lastgroup != "space":
            found.append(Token(match.lastgroup or "", match[0], line))
        line += match[0].count("\n")
        position = match.end()
    return [*found, Token("end", "the end of the file", line)]


class _Parser:
    def __init__(self, tokens: list[Token], file: str) -> None:
        self.tokens, self.file, self.at = tokens, file, 0

    def take(self) -> Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def next_is(self, text: str) -> bool:
        token = self.tokens[self.at]
        return token.kind == "mark" and token.text == text

    def wrong(self, token: Token, wanted: str) -> ShardwiseError:
        return ShardwiseError(
            f"{self.file}, line {token.line}: {token.text!r} stands where {wanted} should"
        )

    def message(self, closing: str, depth: int) -> tuple[Field, ...]:
        """The fields up to this mark, or to the end of the file."""
        fields: list[Field] = []
        while not (self.next_is(closing) if closing else self.tokens[self.at].kind == "end"):
            name = self.take()
            if name.kind != "word" or depth > MAX_DEPTH:
                raise self.wrong(name, "the name of a field" if depth <= MAX_DEPTH else "an end")
            fields += [Field(name.text, value, name.line) for value in self.values(depth)]
        if closing:
            self.take()
        return tuple(fields)

    def values(self, depth: int) -> list[Value]:
        """What follows the name of a field: one value, or several in brackets."""
        has_colon = self.next_is(":")
        if has_colon:
            self.take()
        if not self.next_is("["):
            return [self.value(depth, has_colon)]
        self.take()
        found = []
        while not self.next_is("]"):
            found.append(self.value(depth, has_colon))
        self.take()
        return found

    def value(self, depth: int, has_colon: bool) -> Value:
        token = self.take()
        if token.kind == "mark" and token.text in CLOSING:
            return self.message(CLOSING[token.text], depth + 1)
        if token.kind == "word" and has_colon:
            return Word(token.text)
        if token.kind == "string" and has_colon:
            parts = [self.unquoted(token)]
            while self.tokens[self.at].kind == "string":  # neighbours are one text
                parts.append(self.unquoted(self.take()))
            return "".join(parts)
        raise self.wrong(token, "a value" if has_colon else "':' or '{'")

    def unquoted(self, token: Token) -> str:
        try:
            return literal_eval(token.text)
        except (ValueError, SyntaxError):
            raise self.wrong(token, "text") from None
