"""A product with a weight, over channels: what convolutions and linear layers share.

x_NCHW, w_FCRS, y_NFHW. P2's stationary-x is a split of c, stationary-y of f, stationary-w of both.
A rank with coordinates (c, f) holds the weight block (f, c), needs the input channels of block c
and computes a partial sum of the filters of block f; partial sums are added over c.
"""

from __future__ import annotations

from shardwise.geometry.layout import Layout
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Need, Strategy


class Contraction(Strategy):
    """Samples, space, filters and input channels may all be split."""

    channel_dim = 1
    contracts = True
    joint_channels = False
    keeps_inputs, draws = True, False

    def partial(self, split: Split) -> Layout | None:
        if split.config.c == 1:
            return None
        shape = split.layer.shape
        ranges = [split.dim_ranges(dim) for dim in range(len(shape))]
        dim = self.channel_dim % len(shape)
        ranges[dim] = split.ranges(shape[dim], "f")
        return Layout.of(shape, ranges)

    def bias(self, split: Split) -> tuple[Need, ...]:
        """If there is one, only the first of the ranks whose partial sums are added carries it."""
        if len(split.layer.operands) < 3:
            return ()
        num_filters = split.layer.shape[self.channel_dim]
        first = (split.coordinates["c"] == 0)[:, None]
        return (Need(Layout.of((num_filters,), [split.ranges(num_filters, "f") * first])),)
