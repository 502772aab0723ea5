"""Splits as a person writes them: degrees as n=2,h=2; configs as h=4, n=16 gather, f=2 @0,8."""

from __future__ import annotations

from math import prod

from shardwise.errors import PlanError, ShardwiseError
from shardwise.geometry.grid import AXES, AXIS_NAMES, GRADIENTS, Config
from shardwise.units import is_count

WHOLE = "whole"


def parse_split(text: str) -> dict[str, int]:
    """Degrees by grid axis.

    >>> parse_split("n=2,h=2")
    {'n': 2, 'h': 2}
    """
    split: dict[str, int] = {}
    for part in text.split(","):
        axis, _, degree = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            axes = ", ".join(f"{a} ({AXIS_NAMES[a]})" for a in AXES)
            raise ShardwiseError(f"split {text!r}: {axis!r} is not an axis; the axes are {axes}")
        if axis in split:
            raise ShardwiseError(f"split {text!r}: axis {axis!r} is given twice")
        if not is_count(degree):
            raise ShardwiseError(
                f"split {text!r}: {axis}={degree!r} must be a whole number of at least 1, "
                f"as in n=2,h=2"
            )
        split[axis] = int(degree)
    return split


def parse_config(text: str, world: int) -> tuple[Config, bool]:
    """The config that `str` writes like this, and whether the text names its ranks.

    >>> parse_config("n=2,h=2", 4)
    (Config(n=2, d=1, h=2, w=1, f=1, c=1, ranks=(0, 1, 2, 3), gradient='sum'), False)
    >>> str(parse_config("f=4 @0:16:4", 16)[0])
    'f=4 @0:16:4'
    """
    split, named, ranks = text.partition("@")
    words = split.replace(",", " ").split()
    gradient = words.pop() if words and words[-1] in GRADIENTS else GRADIENTS[0]
    degrees = {} if words == [WHOLE] else parse_split(",".join(words))
    if (needed := prod(degrees.values())) > world:
        raise PlanError(f"split {text!r} needs {needed} workers, and there are {world}")
    try:
        return Config(**degrees, ranks=_ranks(ranks, world), gradient=gradient), bool(named)
    except ValueError as error:
        raise ShardwiseError(f"split {text!r}: {error}") from None


def _ranks(text: str, world: int) -> tuple[int, ...]:
    """Ranks with commas between them, or first, end and step: 0:16:4."""
    numbers = [word.strip() for word in text.replace(":", ",").split(",") if text.strip()]
    if not all(word.isascii() and word.isdigit() for word in numbers):
        raise ValueError(f"ranks {text!r} are not written as in @0,8 or @0:16:4")
    found = tuple(map(int, numbers))
    if ":" not in text:
        return found
    first, end, step = (*found, 1, 1)[:3]
    if len(found) > 3 or end > world or step < 1:
        raise ValueError(f"ranks {text!r} are not first, end and step, as in @0:16:4")
    return tuple(range(first, end, step))


def parse_layer_split(text: str) -> tuple[str, str]:
    """A layer and its split; a name has no equals sign.

    >>> parse_layer_split("layer4.0.conv2=n=2,h=2")
    ('layer4.0.conv2', 'n=2,h=2')
    """
    layer, equals, split = text.partition("=")
    if not (layer and equals and split):
        raise ShardwiseError(f"{text!r} is not a layer and its split, as in layer4.0.conv2=h=4")
    return layer, split
