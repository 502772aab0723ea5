"""Operators along whole lines of their operands: sorting, running sums, maxima, transforms."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import fx

from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request
from shardwise.operators.follow import Follow, Follows, Read, all_of, follow, same
from shardwise.operators.strategy import operator


def along(call: Call, dims: Iterable[int] | None = None, *others: Any) -> Request | None:
    """An operator along dimensions of its tensors, which the result keeps, loses or shrinks."""
    shape, result = call.shape(), call.result
    asked = call["dim"] if dims is None else dims
    asked = (asked,) if isinstance(asked, int) else asked
    if asked is None or any(each is None for each in asked):
        return None
    whole = {dim % len(shape) for dim in asked}
    own = call.model.labels_of(call.x)
    if len(result) == len(shape):
        shrunk = {d for d in whole if result[d] == 1 != shape[d]}
        follows = tuple(None if d in whole else d for d in range(len(shape)))
        labels = "".join("." if d in shrunk else own[d] for d in range(len(shape)))
    else:
        left = [d for d in range(len(shape)) if d not in whole]
        follows = tuple(left.index(d) if d in left else None for d in range(len(shape)))
        labels = ""
    return follow(call, [(x, follows) for x in (call.x, *others)], labels)


def last(call: Call, count: int, *others: str) -> Request | None:
    """An operator on the last dimensions of some tensors; those before are cut alike."""
    rank = len(call.result)
    whole = range(rank - count, rank)
    tensors = [call.x, *(call[name] for name in others)]
    roles = [(tensor, same(call, tensor, whole)) for tensor in tensors]
    return follow(call, roles, call.model.labels_of(call.x))


# -- operators -------------------------------------------------------------------------------------

ALONG = """
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk glu softmax log_softmax argmax
    argmin max min aminmax prod any all logsumexp median nanmedian mode kthvalue
    _softmax _log_softmax _safe_softmax _fft_r2c _fft_c2c _fft_c2r
""".split()  # noqa: SIM905


# What the backward pass of an operator reads; all others read their operands.
KEEP_NOTHING = frozenset("cumsum _fft_r2c _fft_c2c _fft_c2r channel_shuffle".split())  # noqa: SIM905
KEEP_OUTPUT = frozenset("softmax log_softmax _softmax _log_softmax".split())  # noqa: SIM905


def _searched(call: Call) -> Request | None:
    """Values are looked up in sorted rows: one for all, or one for each."""
    rows, values = call.pick("sorted_sequence", "self")
    if not isinstance(values, fx.Node):
        return None
    one = len(call.shape(rows)) == 1
    found = all_of(call, rows) if one else (*range(len(call.shape(rows)) - 1), None)
    orders = [(call["sorter"], found)] if call["sorter"] is not None else []
    return follow(call, [(values, same(call, values)), (rows, found), *orders])


def _crossed(call: Call) -> Request | None:
    whole = {call["dim"] % len(call.result)}
    roles = [(call[name], same(call, call[name], whole)) for name in ("self", "other")]
    return follow(call, roles, call.model.labels_of(call["self"]))


def _classes(call: Call) -> Request | None:
    """Each index becomes a row."""
    return follow(call, [(call["self"], tuple(range(len(call.result) - 1)) or (None,))])


def _against(name: str, others: str, call: Call) -> Request | None:
    """Each element is compared with all of another tensor."""
    x, y = call.pick(name, others)
    if not isinstance(x, fx.Node):
        return None
    return follow(call, [(x, same(call, x)), (y, all_of(call, y))])


def _unpooled(call: Call) -> Request | None:
    return last(call, call.num_dims, "indices")


def _fractional(call: Call) -> Request | None:
    """Windows are random, and given for every channel of every sample."""
    lead = len(call.result) - call.num_dims
    samples: Follows = (0, 1, None) if lead == 2 else (None, 0, None)
    x = (*range(lead), *(None,) * call.num_dims)
    return follow(call, [(call["self"], x), (call["random_samples"], samples)])


def _diagonal_of(call: Call) -> Request | None:
    """The last dimension becomes the diagonal of two."""
    rank = len(call.result)
    whole = {call["dim1"] % rank, call["dim2"] % rank}
    left = [dim for dim in range(rank) if dim not in whole]
    return follow(call, [(call["self"], (*left, None))])


READ: dict[str, Read] = {
    **dict.fromkeys(ALONG, along),
    "channel_shuffle": partial(along, dims=(1,)),
    "native_channel_shuffle": partial(along, dims=(1,)),
    "searchsorted": _searched,
    "bucketize": partial(_against, "self", "boundaries"),
    "isin": partial(_against, "elements", "test_elements"),
    "linalg_cross": _crossed,
    "one_hot": _classes,
    "view_as_real": _classes,
    "view_as_complex": partial(along, dims=(-1,)),
    "max_unpool2d": _unpooled,
    "max_unpool3d": _unpooled,
    "fractional_max_pool2d": _fractional,
    "fractional_max_pool3d": _fractional,
    "diag_embed": _diagonal_of,
}


@operator("along", *READ)
class Along(Follow):
    """Lines are whole; which of them a rank has may be split."""

    table = READ

    def keeps(self, layer: Layer) -> bool:
        return layer.traits.called not in {*KEEP_NOTHING, *KEEP_OUTPUT}

    def keeps_output(self, layer: Layer) -> bool:
        return layer.traits.called in KEEP_OUTPUT
