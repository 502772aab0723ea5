"""Where in the user's files something happens: the line that a message can name."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from shardwise.errors import CaptureError

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OTHERS = (os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"], OURS, "<")


def line_of_error(error: BaseException) -> str:
    """The innermost line of the user's code that an error went through, as file.py:33."""
    frames = traceback.extract_tb(error.__traceback__)
    return _last([(frame.filename, frame.lineno or 0) for frame in frames])


def line_of_node(node: fx.Node) -> str:
    """The line of the user's code that has called an operator."""
    found = FRAME.finditer(node.meta.get("stack_trace") or "")
    return _last([(frame["file"], int(frame["line"])) for frame in found])


def _last(places: list[tuple[str, int]]) -> str:
    for file, line in reversed(places):
        if not os.path.abspath(file).startswith(OTHERS[:-1]) and not file.startswith(OTHERS[-1]):
            shown = os.path.relpath(file)
            return f"{file if shown.startswith('..') else shown}:{line}"
    return ""


@contextmanager
def located(node: fx.Node) -> Iterator[None]:
    """Within, what is refused is said to be at the line that has called this operator."""
    try:
        yield
    except CaptureError as error:
        line = line_of_node(node)
        if not line or line in str(error):
            raise
        raise CaptureError(f"{error} ({line})") from error
    except NotImplementedError as error:  # tensors without memory of their own: sparse ones
        what = f"operator {node.target} at {line_of_node(node) or 'an unknown line'}"
        raise CaptureError(f"{what} cannot be followed: {error}") from error
