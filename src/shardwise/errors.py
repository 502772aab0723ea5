"""The errors a user can cause; each says in one sentence what is wrong and what would be right."""

from collections.abc import Sequence


class ShardwiseError(ValueError):
    """A model, plan, file or shape that cannot be used as asked."""


class CaptureError(ShardwiseError):
    """A model that cannot be turned into a layer graph."""


class PlanError(ShardwiseError):
    """A plan that does not fit the model, the shape or the workers."""


class LostPeer(ShardwiseError):
    """A rank that failed, died, or was cut off, while another needed it."""


class WorkerError(RuntimeError):
    """A worker that failed or died, with its traceback where there is one."""


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def some(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are.

    >>> some(["conv.weight", "conv.bias", "fc.weight"])
    "'conv.weight' and 2 others"
    """
    others = {1: "", 2: " and 1 other"}.get(len(names), f" and {len(names) - 1} others")
    return repr(names[0]) + others
