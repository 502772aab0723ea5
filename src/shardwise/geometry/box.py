"""A box: a half-open range of indices in every dimension of a global tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class Box:
    """Half-open index ranges, one per dimension.

    >>> Box((0, 2), (4, 6)).shape
    (4, 4)
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def empty(self) -> bool:
        return any(size <= 0 for size in self.shape)

    def intersect(self, other: Box) -> Box:
        """The common part; an empty box has no meaning beyond being empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, tuple(map(max, starts, stops)))

    def contains(self, other: Box) -> bool:
        return other.empty or self.intersect(other) == other

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that holds `outer`.

        >>> Box((2,), (4,)).slices_in(Box((1,), (9,)))
        (slice(1, 3, None),)
        """
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.starts, self.stops, outer.starts, strict=True)
        )

    def __str__(self) -> str:
        ranges = zip(self.starts, self.stops, strict=True)
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"
