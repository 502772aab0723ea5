"""When gradients are summed: data that the simulator and the gradient engine both read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.errors import ShardwiseError
from shardwise.plans.program import Program, Run
from shardwise.units import parse_size

WAITS = ("backward", "step", "use")
MODES = ("end", "layer", "chunks", "buckets")
PARTS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)  # of the layers, that "auto" tries as first chunk


@dataclass(frozen=True)
class Engine:
    """When the sums of gradients start, while the backward pass goes on.

    "end": all when the backward pass is over; "layer": each as soon as it is ready; "chunks": those
    of the last k layers with weights together as soon as they are ready, the rest at the end (P3;
    "auto" finds the best k in the first steps); "buckets": whenever so many bytes are ready.
    Those of the `held` last layers start when the backward pass is over, after all others: their
    weights are wanted last in the next step. The backward pass waits for the sums, or (wait="step")
    each optimizer for those of its parameters, or (wait="use") every layer for its own when it is
    used again, if the optimizer is one of `shardwise.optimizer`. Until then `.grad` holds this
    rank's part, or nothing, so leave it alone.
    """

    mode: str = "buckets"
    last: int | Literal["auto"] = 0
    bucket_bytes: int = 8 << 20
    wait: Literal["backward", "step", "use"] = "backward"
    held: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} must be one of {', '.join(MODES)}")
        if self.wait not in WAITS:
            raise ValueError(f"wait {self.wait!r} must be one of {', '.join(WAITS)}")
        if isinstance(self.last, str) and self.last != "auto":
            raise ValueError(f"last {self.last!r} must be a number of layers, or auto")
        if (self.last != "auto" and self.last < 0) or self.bucket_bytes < 1 or self.held < 0:
            raise ValueError(f"{self}: last and held must be 0 or more, and bucket_bytes 1 or more")

    @classmethod
    def of(cls, gradients: Engine | str | None) -> Engine:
        """What is meant: an engine, one as text, or the default.

        >>> Engine.of("chunks:9").last, Engine.of("buckets:8MiB") == Engine()
        (9, True)
        """
        if not isinstance(gradients, str):
            return gradients or cls()
        mode, _, value = gradients.partition(":")
        if mode in ("end", "layer") and not value:
            return cls(mode)
        if gradients == "chunks:auto":
            return cls(mode, last="auto")
        if mode == "chunks" and value.isdecimal() and value.isascii() and int(value):
            return cls(mode, last=int(value))
        if mode == "buckets" and value:
            return cls(mode, bucket_bytes=parse_size(value))
        raise ShardwiseError(
            f"gradients {gradients!r} must be end, layer, chunks:K, chunks:auto or buckets:SIZE, "
            "such as chunks:9 or buckets:25MiB"
        )

    def choices(self, num_layers: int) -> list[Engine]:
        """The engines to choose from for a model with so many layers with weights."""
        if self.mode != "chunks" or self.last != "auto":
            return [self]
        tried = {max(1, round(part * num_layers)) for part in PARTS}
        return [replace(self, last=last) for last in sorted(tried)]

    def chunks(self, sizes: Iterable[float]) -> list[int]:
        """How many layers each chunk has, from the bytes of all layers with weights, last first."""
        found, count, pending = [], 0, 0.0
        for index, nbytes in enumerate(sizes):
            count, pending = count + 1, pending + nbytes
            if self._flushes(index, pending):
                found.append(count)
                count, pending = 0, 0.0
        return [*found, count] if count else found

    def _flushes(self, index: int, pending: float) -> bool:
        """Whether to sum what is pending after the index-th layer with weights."""
        if self.mode == "layer":
            return True
        if self.mode == "chunks":
            return index + 1 == self.last
        return self.mode == "buckets" and pending >= self.bucket_bytes


@dataclass(frozen=True)
class Chunk:
    """Parameters whose gradients are summed together."""

    params: tuple[str, ...]
    start: int  # the position in the backward pass after which their sums start

    @property
    def label(self) -> str:
        """The layers that these parameters belong to."""
        layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in self.params))
        return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def gradient_chunks(program: Program, engine: Engine, itemsize: int) -> list[Chunk]:
    """What a program sums, and when: parameters by the block of backward that completes them.

    Layers whose gradients are gathered count as layers, though they have nothing to sum.
    """
    last: dict[str, int] = {}
    for position, step in enumerate(program.backward):
        if isinstance(step, Run):
            last |= dict.fromkeys(step.params, position)
    layers: dict[int, list[str]] = {position: [] for position in sorted(set(last.values()))}
    for name, position in last.items():
        if name not in program.gathered:
            layers[position].append(name)
    held = [position for position, names in layers.items() if names][: engine.held]
    rest = [position for position in layers if position not in held]
    sizes = [
        sum(float(program.params[name].numels.max()) * itemsize for name in layers[position])
        for position in rest
    ]
    groups, first = [], 0
    for count in engine.chunks(sizes):
        groups.append(rest[first : first + count])
        first += count
    ends = [*((group, group[-1]) for group in groups), *(([one], max(layers)) for one in held)]
    found = [Chunk(tuple(n for one in group for n in layers[one]), end) for group, end in ends]
    return [chunk for chunk in found if chunk.params]
