"""What a layer costs under each of its configs, and what times are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from shardwise.cluster.cluster import Device
from shardwise.geometry.grid import Config
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.layout_columns import Layouts


class Timer(Protocol):
    """Says how long a layer's forward and backward computation take on each rank."""

    def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Roofline:
    """Computation at the device's speed, or as fast as its memory delivers operands."""

    device: Device
    itemsize: int = 4

    def seconds(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        strategy = STRATEGIES[split.layer.op]
        if strategy.free or split.layer.is_input:
            return np.zeros(split.world), np.zeros(split.world)
        computing = strategy.flops(split) / self.device.flops
        moving = strategy.bytes(split, self.itemsize) / self.device.memory_bandwidth
        busy = strategy.output(split).numels > 0
        launch = self.device.launch * busy
        once = np.maximum(computing, moving) * busy
        extra = gathered_flops(split) / self.device.flops
        return once + launch, 2.0 * (once + launch) + extra


def gathered_flops(split: Split) -> np.ndarray:
    """What computing a whole weight gradient on every rank adds to its share (P3)."""
    strategy = STRATEGIES[split.layer.op]
    if not strategy.gathers(split):
        return np.zeros(split.world)
    return strategy.flops(split) * (split.grid.degrees["n"] - 1.0)


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as it costs time and memory."""

    itemsize: int = 4
    states: int = 1  # numbers per weight that the optimizer keeps: 1 for momentum, 2 for Adam
    output: str = "full"  # every rank gets the whole output, or "local": its part
    whole_classes: bool = True  # of a part, which a loss needs
    gradients: bool = True  # False: inference only
    # Of norms; "local": each rank its own, as in other systems that are simulated.
    statistics: Literal["global", "local"] = "global"


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """The costs of one layer under each of its configs, in seconds and bytes."""

    configs: tuple[Config, ...]
    forward: np.ndarray  # [configs], as the others
    backward: np.ndarray
    transfer: np.ndarray  # inside the layer: partial sums and statistics
    update: np.ndarray
    moved: np.ndarray  # bytes of transfer and update
    stored: np.ndarray  # bytes of weights, gradients and optimizer on the fullest rank
    saved: np.ndarray  # bytes kept for the backward pass
    outputs: Layouts
    needs: tuple[Layouts | None, ...]  # per operand; None for weights

    @cached_property
    def places(self) -> dict[Config, int]:
        return {config: place for place, config in enumerate(self.configs)}

    @cached_property
    def compute(self) -> np.ndarray:
        return self.forward + self.backward

    @cached_property
    def total(self) -> np.ndarray:
        return self.compute + self.transfer + self.update

    @cached_property
    def memory(self) -> np.ndarray:
        return self.stored + self.saved
