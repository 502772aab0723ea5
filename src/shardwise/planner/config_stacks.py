"""Configs side by side: those that a strategy can judge in one call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from shardwise.geometry.grid import AXES, Config
from shardwise.operators import Stack

FEW = 8  # arrays of a kind that a stack remembers on large clusters
Group = tuple[list[int], Stack]  # the places of some configs, and these configs side by side


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
            (places, Stack(tuple(configs[place] for place in places), self.world))
            for places in groups.values()
        ]
        if len(configs) > 1:
            self._known[key] = configs, found  # the configs stay alive with their id
        return found

    def forget(self) -> None:
        """Only the next few layers have the same layouts; on many ranks they fill the memory."""
        stacks = (stack for _, groups in self._known.values() for _, stack in groups)
        for known in (known for stack in stacks for known in (stack.layouts, stack._ranges)):
            while len(known) > FEW:
                known.pop(next(iter(known)))


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
