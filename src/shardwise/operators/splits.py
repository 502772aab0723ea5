"""A layer under a config: where each rank stands, and its range of every dimension."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Generic

import numpy as np

from shardwise.geometry.grid import AXES, Config
from shardwise.geometry.layout import Layout, Ranges, block
from shardwise.graph.layer_graph import Attrs, Layer

# The grid axes that split a dimension of this label. Channels of an output are split by filters
# and input channels together, linearised (P2): x and y then live in the same layout.
LABEL_AXES = {"n": ("n",), "d": ("d",), "h": ("h",), "w": ("w",), "c": ("f", "c"), ".": ()}


def rows(ranges: Ranges, per_row: int) -> Ranges:
    """The rows of so many elements that hold these ranges of elements."""
    return np.stack([ranges[:, 0] // per_row, -(-ranges[:, 1] // per_row)], axis=1)


def window(ranges: Ranges, kernel: int, stride: int, left: int, dilation: int = 1) -> Ranges:
    """The input range that an output range reads, halo included; it may reach into padding."""
    starts = ranges[:, 0] * stride - left
    stops = (ranges[:, 1] - 1) * stride - left + dilation * (kernel - 1) + 1
    empty = ranges[:, 1] <= ranges[:, 0]
    return np.where(empty[:, None], 0, np.stack([starts, stops], axis=1))


MOST_KEPT = 4096  # answers of a grid: models may be given images of any number of sizes


def _keep(answers: dict[Any, Any], most: int) -> None:
    """Forgets the oldest answers."""
    while len(answers) > most:
        answers.pop(next(iter(answers)))


@dataclass(frozen=True, eq=False)
class Grid:
    """Where each rank stands under a config; the same for all layers that have this config.

    Several configs that split the same axes may have their ranks side by side: what strategies say
    is computed rank by rank, so that one call answers for all of them.
    """

    configs: tuple[Config, ...]
    world: int  # of each config
    _layouts: dict[tuple[Any, ...], Layout] = field(default_factory=dict)
    _ranges: dict[tuple[Any, ...], Ranges] = field(default_factory=dict)

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, config: Config, world: int) -> Grid:
        return cls((config,), world)

    @cached_property
    def coordinates(self) -> dict[str, np.ndarray]:
        each = [config.coordinates(self.world) for config in self.configs]
        return {axis: np.concatenate([c[axis] for c in each]) for axis in AXES}

    @cached_property
    def degrees(self) -> dict[str, np.ndarray]:
        """The degree of each axis, for each rank."""
        each = np.repeat([config.degrees for config in self.configs], self.world, axis=0)
        return dict(zip(AXES, each.T, strict=True))

    @cached_property
    def used(self) -> np.ndarray:
        return self.coordinates["n"] >= 0

    def ranges(self, size: int, axes: tuple[str, ...]) -> Ranges:
        """Each rank's block of `size` indices split over the product of these axes."""
        if (size, axes) not in self._ranges:
            self._ranges[size, axes] = self._new_ranges(size, axes)
            _keep(self._ranges, MOST_KEPT)
        return self._ranges[size, axes]

    def layout(self, shape: tuple[int, ...], dims: str) -> Layout:
        """The blocks of a tensor whose dimensions have these labels."""
        if (shape, dims) not in self._layouts:
            pairs = zip(shape, dims, strict=True)
            ranges = [self.ranges(size, LABEL_AXES[label]) for size, label in pairs]
            self._layouts[shape, dims] = Layout.of(shape, ranges)
            _keep(self._layouts, MOST_KEPT)
        return self._layouts[shape, dims]

    def forget(self, most: int) -> None:
        """Keeps the last few answers only."""
        _keep(self._layouts, most)
        _keep(self._ranges, most)

    def _new_ranges(self, size: int, axes: tuple[str, ...]) -> Ranges:
        index, degree = np.zeros(len(self.used), dtype=np.int64), 1
        for axis in axes:
            index = index * self.degrees[axis] + self.coordinates[axis]
            degree = degree * self.degrees[axis]
        found = block(size, index, degree) * self.used[:, None]
        found.setflags(write=False)
        return found


@dataclass(frozen=True, eq=False)
class Split(Generic[Attrs]):
    """A layer under a config, on so many ranks."""

    layer: Layer[Attrs]
    config: Config
    world: int
    stack: Grid | None = None
    memory: dict[tuple[str, str], Any] = field(default_factory=dict)  # see `remembered`

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, layer: Layer, config: Config, world: int) -> Split:
        """The split, made once: what it computes is remembered with it."""
        return cls(layer, config, world)

    @classmethod
    def stacked(cls, layer: Layer, stack: Grid) -> Split:
        """The layer under all configs of a grid; the first stands for all in what is split."""
        return cls(layer, stack.configs[0], stack.world * len(stack.configs), stack)

    @cached_property
    def grid(self) -> Grid:
        return self.stack or Grid.of(self.config, self.world)

    @property
    def coordinates(self) -> dict[str, np.ndarray]:
        return self.grid.coordinates

    @property
    def used(self) -> np.ndarray:
        return self.grid.used

    def degree(self, *axes: str) -> int:
        return prod(getattr(self.config, axis) for axis in axes)

    def ranges(self, size: int, *axes: str) -> Ranges:
        """Each rank's block of `size` indices split over the product of these axes."""
        return self.grid.ranges(size, axes)

    def dim_ranges(self, dim: int) -> Ranges:
        """Each rank's range of one dimension of the output."""
        return self.ranges(self.layer.shape[dim], *LABEL_AXES[self.layer.dims[dim]])

    def all_ranges(self) -> list[Ranges]:
        """Each rank's range of every dimension of the output."""
        return [self.dim_ranges(dim) for dim in range(len(self.layer.shape))]

    def but(self, dim: int, ranges: Ranges) -> list[Ranges]:
        """Each rank's range of every dimension of the output, and of this one another."""
        found = self.all_ranges()
        found[dim] = ranges
        return found

    def dim_degree(self, dim: int) -> int:
        return self.degree(*LABEL_AXES[self.layer.dims[dim]])

    @cached_property
    def splits_space(self) -> bool:
        """Whether a dimension behind samples and channels is cut, whatever its label."""
        return any(self.dim_degree(dim) > 1 for dim in range(2, len(self.layer.shape)))

    def whole(self, size: int) -> Ranges:
        """The whole range, on the ranks that are used."""
        return self.grid.ranges(size, ())
