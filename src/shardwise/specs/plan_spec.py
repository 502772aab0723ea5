"""What a user writes for a plan, and which plan is meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from shardwise.errors import PlanError, ShardwiseError
from shardwise.geometry.split_text import parse_split
from shardwise.graph.layer_graph import LayerGraph
from shardwise.plans.plan import Plan

AUTO, OWT = "auto", "owt"  # other names of plans are files


@dataclass(frozen=True)
class PlanSpec:
    """Which plan is meant: one split for every layer, else "owt", a file, or the best ("auto").

    >>> PlanSpec.parse("auto", "n=2,h=2").num_workers
    4
    """

    name: str = AUTO
    split: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str | None, split: str | None) -> PlanSpec:
        return cls(name or AUTO, parse_split(split) if split is not None else {})

    def __str__(self) -> str:
        if self.split:
            return f"split {' '.join(f'{axis}={degree}' for axis, degree in self.split.items())}"
        return self.name if self.name in (AUTO, OWT) else f"plan file {self.name}"

    @cached_property
    def saved(self) -> Plan | None:
        """The plan of the file that is meant."""
        return None if self.split or self.name in (AUTO, OWT) else Plan.load(self.name)

    @property
    def num_workers(self) -> int | None:
        """How many workers it takes, where that is known."""
        if self.split:
            return prod(self.split.values())
        return self.saved.world if self.saved is not None else None

    def check_workers(self, world: int) -> None:
        """Raises where there are too few workers, or others than a file's plan is for."""
        needed = self.num_workers
        if self.split and needed is not None and needed > world:
            raise ShardwiseError(f"{self} needs {needed} workers, and there are {world}")
        if self.saved is not None and needed != world:
            raise PlanError(f"{self} is for {needed} workers, and there are {world}")

    def find(self, graph: LayerGraph, world: int, best: Callable[[], Plan]) -> Plan:
        """The plan itself, checked; `best` finds the one that "auto" stands for."""
        self.check_workers(world)
        if self.split:
            return Plan.uniform(graph, world, **self.split)
        if self.name == OWT:
            return Plan.owt(graph, world)
        if self.saved is None:
            return best()
        self.saved.check(graph)
        return self.saved
