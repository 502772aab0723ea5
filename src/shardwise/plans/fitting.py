"""The legal config of a layer that is nearest to a wanted split, and random legal ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from math import gcd, prod

import numpy as np

from shardwise.geometry.grid import AXES, SPACE, Config
from shardwise.graph.layer_graph import Layer
from shardwise.operators import STRATEGIES

# What an axis cannot take moves on to another one, in this order.
MOVES = (("c", "f"), ("d", "n"), ("h", "n"), ("w", "n"), ("f", "n"), ("n", ""))


def fit(layer: Layer, wanted: Config, batch: int) -> Config:
    """The legal config nearest to a wanted split.

    What an axis cannot take moves on: input channels to filters, everything else to samples. Where
    these have no room, a direction that the layer does not have is another one: rows of attention
    may be called depth or height. What is left is dropped, so that fewer workers are used.
    """
    strategy = STRATEGIES[layer.op]
    limits = strategy.limits(layer, batch)
    return _within(tuple(limits.items()), strategy.joint_channels, wanted)


@lru_cache(maxsize=4096)
def _within(known: tuple[tuple[str, int], ...], joint_channels: bool, wanted: Config) -> Config:
    """The same for any layer with these limits: many layers have the same."""
    limits = dict(known)
    degrees: dict[str, int] = dict(zip(AXES, wanted.degrees, strict=True))
    if joint_channels and "f" in limits and degrees["f"] * degrees["c"] > limits["f"]:
        degrees["f"], degrees["c"] = degrees["f"] * degrees["c"], 1
    moved = 1  # to samples, from directions that the layer does not have
    for axis, fallback in MOVES:
        kept = _largest_divisor(degrees[axis], limits.get(axis, 1))
        rest, degrees[axis] = degrees[axis] // kept, kept
        if fallback:
            degrees[fallback] *= rest
            moved *= rest if axis in SPACE and limits.get(axis, 1) == 1 else 1
        else:
            _spread(gcd(rest, moved), degrees, limits)
    return Config(**degrees, ranks=_kept_ranks(wanted, tuple(degrees.values())))  # type: ignore[arg-type]


def _spread(rest: int, degrees: dict[str, int], limits: Mapping[str, int]) -> None:
    """Gives so many parts to the directions of space that have room for more."""
    for axis in SPACE:
        more = _largest_divisor(rest, limits.get(axis, 1) // degrees[axis])
        degrees[axis] *= more
        rest //= more


def _kept_ranks(wanted: Config, degrees: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that form the smaller grid: each keeps its place, so that weights stay with it."""
    used = prod(degrees)
    if used == wanted.num_workers:
        return wanted.ranks
    if all(new <= old for new, old in zip(degrees, wanted.degrees, strict=True)):
        grid = np.reshape(wanted.ranks, wanted.degrees)
        return tuple(grid[tuple(map(slice, degrees))].ravel().tolist())
    merged, held = (_weights_apart(each) for each in (degrees, wanted.degrees))
    if all(new <= old for new, old in zip(merged, held, strict=True)):
        grid = np.reshape(wanted.ranks, held)
        return tuple(grid[tuple(map(slice, merged))].ravel().tolist())
    return tuple(sorted(wanted.ranks))[:used]


def _weights_apart(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """The degrees of filters and channels, before them that of all others together."""
    return (prod(degrees[:-2]), *degrees[-2:])


def _largest_divisor(number: int, limit: int) -> int:
    return next(k for k in range(min(number, max(limit, 1)), 0, -1) if number % k == 0)


def random_config(layer: Layer, world: int, generator: random.Random) -> Config:
    """A random legal config: random degrees whose product fits, on random ranks."""
    strategy = STRATEGIES[layer.op]
    limits = strategy.axes(layer)
    degrees, room = {}, generator.randint(1, world)
    for axis in generator.sample(list(limits), len(limits)):
        limit = room if axis == "n" else min(room, max(limits[axis], 1))
        degrees[axis] = generator.randint(1, limit)
        room //= degrees[axis]
    if strategy.joint_channels and "f" in limits:
        size = layer.shape[layer.dims.index("c")] if "c" in layer.dims else 1
        if degrees["f"] * degrees["c"] > size:
            degrees["c"] = 1
    ranks = tuple(generator.sample(range(world), prod(degrees.values())))
    return Config(**degrees, ranks=ranks)
