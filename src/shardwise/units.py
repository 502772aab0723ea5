"""Rates, sizes, times and ratios as a person writes them: 10Gb, 12GiB, 2.5us, 15.7Tflop/s, 4:1.

Case matters only where it tells bits (b) from bytes (B). K, M, G, T and P are decimal, Ki, Mi, Gi,
Ti and Pi binary. A number without a unit is in bytes, bytes/s, seconds or flop/s already.
"""

from __future__ import annotations

import math
import re

from shardwise.errors import ShardwiseError

_NUMBER = r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_PREFIX = r"(?P<prefix>(?i:[kmgtp]i?))?"
_BITS = r"b|(?i:bits?)"
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_MULTIPLES = {**_DECIMAL, **_BINARY}
_PER_SECOND = {"": 1, "m": 10**3, "u": 10**6, "\u00b5": 10**6, "\u03bc": 10**6, "n": 10**9}


def parse_rate(text: str) -> float:
    """Bytes per second; the `/s` may be left out.

    >>> parse_rate("10Gb"), parse_rate("1GB/s"), parse_rate("600mbit")
    (1250000000.0, 1000000000.0, 75000000.0)
    """
    unit = rf"{_PREFIX}(?:(?P<bits>{_BITS})|B)(?:/s|ps)?"
    number, groups = _read(text, unit, "a rate such as 10Gb, 600Mbit/s or 1GB/s")
    return number * _multiple(groups["prefix"]) / (8 if groups["bits"] else 1)


def parse_size(text: str) -> int:
    """Bytes; a size in bits is refused, since 12Gb of memory is most likely a slip.

    >>> parse_size("12GiB"), parse_size("1.5MB")
    (12884901888, 1500000)
    """
    number, groups = _read(text, f"{_PREFIX}B", "a size in bytes such as 12GiB or 16GB")
    return round(number * _multiple(groups["prefix"]))


def parse_seconds(text: str) -> float:
    """Seconds.

    >>> parse_seconds("2.5us"), parse_seconds("1ms")
    (2.5e-06, 0.001)
    """
    unit = "(?P<prefix>(?i:[mun\u00b5\u03bc]))?(?i:s)"
    number, groups = _read(text, unit, "a time such as 2.5us, 1ms or 0.1s")
    return number / _PER_SECOND[(groups["prefix"] or "").lower()]


def parse_flops(text: str) -> float:
    """Floating-point operations per second.

    >>> parse_flops("15.7Tflop/s")
    15700000000000.0
    """
    unit = rf"{_PREFIX}(?i:flop(?:/s|s)?)"
    number, groups = _read(text, unit, "a speed such as 15.7Tflop/s")
    return number * _multiple(groups["prefix"])


def parse_ratio(text: str) -> float:
    """A ratio to one.

    >>> parse_ratio("4:1")
    4.0
    """
    return _read(text, ":1", "a ratio such as 4:1")[0]


def is_count(text: str) -> bool:
    """Whether this is a whole number of at least 1."""
    return text.isascii() and text.isdigit() and int(text) >= 1


def _read(text: str, unit: str, what: str) -> tuple[float, dict[str, str | None]]:
    """The number and the named groups of the unit, or one sentence that says what was expected."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*(?:{unit})?\s*", text, re.ASCII)
    number = float(match["number"]) if match else math.inf
    if match is None or not math.isfinite(number):
        raise ShardwiseError(f"{text!r} is not {what}")
    return number, match.groupdict()


def _multiple(prefix: str | None) -> int:
    return _MULTIPLES[(prefix or "").lower()]
