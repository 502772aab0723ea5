"""The configs that a search considers for each layer, and how many of them are described at once.

Degrees are products of *units*: the prime factors of the number of workers, and powers of two below
it. On large clusters that is too many, so small units are merged, and height and width (and depth)
are split together, as squarely as they can be. Layers on fewer workers than all lie on the first
ranks (close together, tried on small clusters) or spread evenly over all ranks (close to the data
of layers on all ranks).

A layer has hundreds of configs, so strategies are asked about stacks of them, and the layouts that
they answer with are kept as columns: thousands of layouts are made of a few hundred columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

from sympy import factorint

from shardwise.errors import PlanError
from shardwise.geometry.grid import AXES, SPACE, Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES, Grid

LIMIT = 256  # degree tuples per layer beyond which the space is coarsened
CLOSE = 64  # workers up to which layers on fewer of them are also tried on the first ranks


@dataclass(frozen=True, eq=False)
class Candidates:
    """The space of the search: which splits of a layer are tried on so many workers."""

    world: int
    spatial: tuple[str, ...]  # the spatial axes of the model, e.g. ("h", "w")
    _known: dict[Hashable, tuple[Config, ...]] = field(default_factory=dict)
    _sets: dict[tuple[int, ...], tuple[Config, ...]] = field(default_factory=dict)
    _made: dict[Hashable, Config] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: LayerGraph, world: int) -> Candidates:
        labels = {label for layer in graph.layers for label in layer.dims}
        return cls(world, tuple(axis for axis in SPACE if axis in labels))

    @cached_property
    def _joint_space(self) -> bool:
        axes = 3 + len(self.spatial)
        return len(self.spatial) > 1 and len(_degrees(_primes(self.world), axes)) > LIMIT

    @cached_property
    def _units(self) -> tuple[tuple[int, ...], ...]:
        """The units whose products are degrees; several sets where the number is not round."""
        axes = 3 + (1 if self._joint_space else len(self.spatial))
        below = 1 << (self.world.bit_length() - 1)
        found = []
        for number in dict.fromkeys((self.world, below)):
            units = _primes(number)
            while len(_degrees(units, axes)) > LIMIT:
                units = tuple(sorted((units[0] * units[1], *units[2:])))
            found.append(units)
        return tuple(found)

    def configs(self, layer: Layer, batch: int) -> tuple[Config, ...]:
        """The legal configs of a layer that are tried, on all workers first."""
        strategy = STRATEGIES[layer.op]
        limits = strategy.limits(layer, batch)
        if strategy.joint_channels:
            limits.pop("c", None)  # f alone splits the same dimension
        limits = {axis: min(limit, self.world) for axis, limit in limits.items()}
        gather = strategy.can_gather(layer)
        key = (tuple(limits.items()), gather)
        if key not in self._known:
            found = dict.fromkeys(self._configs(limits, gather))
            ordered = sorted(found, key=lambda c: (-len(c.ranks), c.ranks[-1] >= len(c.ranks)))
            # Layers with the same configs get the same object, so that they share stacks.
            self._known[key] = self._sets.setdefault(tuple(map(id, ordered)), tuple(ordered))
        return self._known[key]

    def _configs(self, limits: dict[str, int], can_gather: bool) -> Iterator[Config]:
        for degrees in self._splits(limits):
            count = prod(degrees.values())
            for ranks in self._placements(count):
                yield self._config(degrees, ranks, "sum")
                if can_gather and degrees.get("n") == count > 1:
                    yield self._config(degrees, ranks, "gather")

    def _config(self, degrees: dict[str, int], ranks: range, gradient: str) -> Config:
        """The config, made once: those of all layers are the same objects."""
        key = (*degrees.items(), ranks, gradient)
        if key not in self._made:
            made: dict[str, Any] = {**degrees, "ranks": tuple(ranks), "gradient": gradient}
            self._made[key] = Config(**made)
        return self._made[key]

    def _splits(self, limits: dict[str, int]) -> Iterator[dict[str, int]]:
        spatial = [axis for axis in self.spatial if axis in limits]
        together = self._joint_space and len(spatial) > 1
        names = [axis for axis in AXES if axis in limits and not (together and axis in spatial)]
        for units in self._units:
            for degrees in _degrees(units, len(names) + together):
                split = dict(zip(names, degrees, strict=False))
                if together:
                    split |= _squarely(degrees[-1], spatial, limits)
                    if prod(split[a] for a in spatial) != degrees[-1]:
                        continue
                if all(degree <= limits[axis] for axis, degree in split.items()):
                    yield split

    def _placements(self, count: int) -> Iterator[range]:
        spread = 1 < count < self.world and self.world % count == 0
        if spread:
            yield range(0, self.world, self.world // count)
        if not spread or self.world <= CLOSE:
            yield range(count)


def most_workers(configs: dict[str, tuple[Config, ...]], world: int) -> None:
    """Raises where no layer can use all workers."""
    most = max(len(config.ranks) for found in configs.values() for config in found)
    if most < world:
        raise PlanError(
            f"no layer of this model can be split over {world} workers; the most that a layer can "
            f"use is {most}, so give --workers {most} or a larger batch"
        )


def _primes(number: int) -> tuple[int, ...]:
    return tuple(factorint(number, multiple=True))


@lru_cache(maxsize=256)
def _degrees(units: tuple[int, ...], axes: int) -> tuple[tuple[int, ...], ...]:
    """All ways to give each unit to an axis or to none, as degrees per axis."""
    found = {(1,) * axes}
    for unit in units:
        grown = [
            (*degrees[:axis], degrees[axis] * unit, *degrees[axis + 1 :])
            for degrees, axis in product(found, range(axes))
        ]
        found |= set(grown)
    return tuple(sorted(found))


def _squarely(degree: int, axes: list[str], limits: dict[str, int]) -> dict[str, int]:
    """A degree shared out over the spatial axes, always to the one that is split least."""
    split = dict.fromkeys(axes, 1)
    for factor in reversed(_primes(degree)):
        room = [axis for axis in axes if split[axis] * factor <= limits[axis]]
        if not room:
            break
        least = min(room, key=lambda axis: split[axis])
        split[least] *= factor
    return split


# -- configs side by side: those that a strategy can judge in one call -----------------------------

FEW = 8  # arrays of a kind that a stack remembers on large clusters
Group = tuple[list[int], Grid]  # the places of some configs, and these configs side by side


class Stacks:
    """Sets of configs, cut into stacks that can be judged together."""

    def __init__(self, world: int, merge: bool) -> None:
        self.world, self.merge = world, merge
        self._known: dict[Hashable, tuple[tuple[Config, ...], list[Group]]] = {}

    def of(self, configs: tuple[Config, ...], apart: bool) -> list[Group]:
        """The stacks of these configs; `apart`: each for itself."""
        key = (id(configs), apart)
        if key in self._known:
            return self._known[key][1]
        groups: dict[Hashable, list[int]] = {}
        for place, config in enumerate(configs):
            groups.setdefault(place if apart else _pattern(config, AXES), []).append(place)
        if self.merge and not apart:
            groups = _merged(configs, groups)
        found: list[Group] = [
            (places, Grid(tuple(configs[place] for place in places), self.world))
            for places in groups.values()
        ]
        if len(configs) > 1:
            self._known[key] = configs, found  # the configs stay alive with their id
        return found

    def forget(self) -> None:
        """Only the next few layers have the same layouts; on many ranks they fill the memory."""
        for _, groups in self._known.values():
            for _, stack in groups:
                stack.forget(FEW)


def _pattern(config: Config, axes: Iterable[str]) -> tuple[str, ...]:
    """The axes that are split: what strategies say depends on them and on each rank's place."""
    return config.gradient, *(axis for axis in axes if getattr(config, axis) > 1)


def _merged(
    configs: tuple[Config, ...], groups: dict[Hashable, list[int]]
) -> dict[Hashable, list[int]]:
    """Patterns that differ in samples and filters only, put together.

    What holds where such an axis is split also holds where its degree is 1, so that a config that
    splits them all speaks for its stack; without one, patterns stay apart. (Not so for space, where
    a split changes what is padded.)
    """
    merged: dict[Hashable, list[list[int]]] = {}
    for places in groups.values():
        alike = _pattern(configs[places[0]], ("d", "h", "w", "c"))
        merged.setdefault(alike, []).append(places)
    found: dict[Hashable, list[int]] = {}
    for alike, parts in merged.items():
        patterns = [_pattern(configs[places[0]], AXES) for places in parts]
        widest = max(range(len(parts)), key=lambda i: len(patterns[i]))
        if set(patterns[widest]) == set().union(*patterns):
            parts.insert(0, parts.pop(widest))
            found[alike] = [place for places in parts for place in places]
        else:
            found |= {(alike, i): places for i, places in enumerate(parts)}
    return found
