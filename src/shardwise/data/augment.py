"""Augmentation: a random window of a sample, perhaps mirrored, decided by (seed, epoch, sample).

All ranks that share a sample decide the same, and each looks only at its own box: the box that it
reads is the pre-image of the box that it wants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box

from .order import AUGMENT, random_bits

BITS_PER_DIM = 20  # of a sample's 64, for where the window lies; one more for the mirror
MAX_SPACE = 3
FORWARD, BACKWARD = slice(None), slice(None, None, -1)


@dataclass(frozen=True)
class Look:
    """How a box of an augmented sample is had: a box to read, to mirror, and to put in place."""

    box: Box
    mirror: tuple[slice, ...]
    place: tuple[slice, ...]

    def put(self, part: np.ndarray, out: np.ndarray) -> None:
        """Puts what was read where it belongs; the rest of `out` is padding."""
        out[self.place] = part[self.mirror]


@dataclass(frozen=True, eq=False)
class Views:
    """Where augmented samples lie in stored ones: windows, and the dims that are mirrored.

    A window may reach over the borders of a sample; there is padding. Arrays are [samples, dims].
    """

    starts: np.ndarray
    mirrored: np.ndarray
    size: tuple[int, ...]  # of every window
    shape: tuple[int, ...]  # of a stored sample

    def __getitem__(self, samples: slice) -> Views:
        return Views(self.starts[samples], self.mirrored[samples], self.size, self.shape)

    def of_space(self) -> Views:
        """The views without channels: those of labels."""
        return Views(self.starts[:, 1:], self.mirrored[:, 1:], self.size[1:], self.shape[1:])

    def looks(self, box: Box) -> Iterator[Look | None]:
        """For each sample, what becomes this box of the window; None where that is all padding."""
        length = np.subtract(box.stops, box.starts)
        first = np.where(self.mirrored, np.subtract(self.size, box.stops), box.starts)
        first = first + self.starts
        low, high = np.maximum(first, 0), np.minimum(first + length, self.shape)
        before, after = low - first, high - first
        begin = np.where(self.mirrored, length - after, before)
        end = np.where(self.mirrored, length - before, after)
        some = (low < high).all(axis=1)
        bounds = (array.tolist() for array in (low, high, begin, end, self.mirrored, some))
        for lows, highs, begins, ends, mirrored, any_inside in zip(*bounds, strict=True):
            if not any_inside:
                yield None
                continue
            mirror = tuple(BACKWARD if backward else FORWARD for backward in mirrored)
            yield Look(Box(tuple(lows), tuple(highs)), mirror, tuple(map(slice, begins, ends)))


@dataclass(frozen=True)
class Augment:
    """What is done to samples: a window of `size` with `padding` around, flips, normalising.

    `flip` says in which dims of space (height and width, say) a sample is mirrored, by chance of
    one half. Numbers are scaled to about 0 to 1 and then normalised by mean and standard deviation
    per channel. With random=False the window is in the middle and nothing is mirrored.

    >>> Augment(flip=(False, True), padding=4).out_shape((3, 32, 32))
    (3, 32, 32)
    """

    flip: tuple[bool, ...] = ()
    size: tuple[int, ...] | None = None  # of the space of what comes out; None: as it is stored
    padding: int = 0  # zeros on each side, before normalising
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    random: bool = True

    def for_evaluation(self) -> Augment:
        """The same without chance."""
        return replace(self, flip=(), random=False)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises unless this can be done to samples of this shape."""
        channels, *space = shape
        if self.flip and len(self.flip) != len(space):
            raise ShardwiseError(f"flip has {len(self.flip)} dims, and samples have {len(space)}")
        if self.padding < 0:
            raise ShardwiseError(f"padding={self.padding} must be at least 0")
        size = self.size or tuple(space)
        room = [length + 2 * self.padding for length in space]
        if len(size) != len(space) or any(not 1 <= s <= r for s, r in zip(size, room, strict=True)):
            raise ShardwiseError(f"size={size} does not fit into padded samples of {room}")
        if self._chooses and len(space) > MAX_SPACE:
            raise ShardwiseError(f"samples have {len(space)} dims of space, more than {MAX_SPACE}")
        for name in ("mean", "std"):
            if getattr(self, name) and len(getattr(self, name)) != channels:
                raise ShardwiseError(f"{name} must have {channels} numbers, one per channel")
        if any(not deviation > 0 for deviation in self.std):
            raise ShardwiseError(f"std={self.std} must be above 0")

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], *(self.size or shape[1:]))

    @property
    def _chooses(self) -> bool:
        return self.random and (any(self.flip) or self.size is not None or self.padding > 0)

    def chances(self, num_samples: int, seed: int, epoch: int) -> np.ndarray | None:
        """The random bits of an epoch's samples, if there is anything to choose."""
        return random_bits(num_samples, seed, epoch, AUGMENT) if self._chooses else None

    def views(self, shape: tuple[int, ...], num: int, bits: np.ndarray | None) -> Views:
        """The views of so many samples of this shape, chosen by their bits."""
        size = self.out_shape(shape)
        starts = np.zeros((num, len(shape)), dtype=np.int64)
        mirrored = np.zeros((num, len(shape)), dtype=bool)
        for dim in range(1, len(shape)):
            if bits is None:
                starts[:, dim] = (shape[dim] - size[dim]) // 2
                continue
            own = bits >> np.uint64((dim - 1) * (BITS_PER_DIM + 1))
            num_places = shape[dim] + 2 * self.padding - size[dim] + 1
            chance = (own >> np.uint64(1)) & np.uint64(2**BITS_PER_DIM - 1)
            places = chance * np.uint64(num_places) >> np.uint64(BITS_PER_DIM)
            starts[:, dim] = places.astype(np.int64) - self.padding
            if self.flip and self.flip[dim - 1]:
                mirrored[:, dim] = own & np.uint64(1)
        return Views(starts, mirrored, size, shape)

    def normalised(self, values: np.ndarray, scale: float, channels: slice) -> np.ndarray:
        """Stored numbers [samples, channels, *space] as float32, for these channels of a sample."""
        out = values.astype(np.float32)
        if not self.mean and not self.std:
            if scale != 1:
                out *= np.float32(scale)
            return out
        deviation = np.array(self.std or 1.0, dtype=np.float64)
        factor, offset = scale / deviation, -np.array(self.mean or 0.0) / deviation
        ones = (1,) * (values.ndim - 2)
        for number, apply in ((factor, np.multiply), (offset, np.add)):
            per_channel = np.broadcast_to(number, max(len(self.mean), len(self.std)))[channels]
            apply(out, per_channel.astype(np.float32).reshape(-1, *ones), out=out)
        return out


def flips(text: Sequence[str], num_space: int) -> tuple[bool, ...]:
    """Which dims of space are meant by the letters d, h and w.

    >>> flips("w", 2)
    (False, True)
    """
    letters = "dhw"[-num_space:]
    if not set(text) <= set(letters):
        raise ShardwiseError(f"flip={''.join(text)!r} must be made of {', '.join(letters)}")
    return tuple(letter in text for letter in letters)
