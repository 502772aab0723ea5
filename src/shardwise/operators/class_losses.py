"""Losses that classify: each sample, or each of its positions, needs all classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.operators.calls import Call, Request
from shardwise.operators.follow import Follow, Follows, Read, all_of, follow
from shardwise.operators.splits import Split
from shardwise.operators.strategy import operator

# x is [C], [N, C] or [N, C, ...], the result has no C. Means and sums are other layers: parts.py.


def _classified(call: Call) -> Request | None:
    if call["reduction"]:
        return None
    x, target = call.pick("self", "target")
    rank = len(call.shape(x))
    by_sample: Follows = (0, None, *range(1, rank - 1)) if rank > 1 else (None,)
    one: Follows = tuple(range(max(rank - 1, 1))) if rank > 1 else (None,)
    is_like_x = call.shape(target) == call.shape(x)
    roles: list[tuple[Any, Follows]] = [(x, by_sample), (target, by_sample if is_like_x else one)]
    weight = call.args.get("weight")
    if weight is not None:
        roles.append((weight, all_of(call, weight)))
    return follow(call, roles)


NAMES = ("cross_entropy_loss", "nll_loss_nd", "multi_margin_loss", "multilabel_margin_loss")
TABLE: dict[str, Read] = dict.fromkeys(NAMES, _classified)


@operator("loss", *NAMES)
class Loss(Follow):
    """Samples and positions may be split, classes are whole."""

    table = TABLE

    def flops(self, split: Split) -> np.ndarray:
        return 2.0 * super().flops(split)
