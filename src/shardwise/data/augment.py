"""Augmentation: a random window of a sample, perhaps mirrored, decided by (seed, epoch, sample).

All ranks that share a sample decide the same, and each looks only at its own box: the box that it
reads is the pre-image of the box that it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.box import Box
from shardwise.errors import ShardwiseError

from .order import AUGMENT, random_bits

BITS_PER_DIM = 20  # of a sample's 64, for where the window lies; one more for the mirror
MAX_SPACE = 3


@dataclass(frozen=True)
class View:
    """Where an augmented sample lies in the stored one: a window, and the dims it is mirrored in.

    The window may reach over the borders of the sample; there is padding.
    """

    window: Box
    mirrored: tuple[bool, ...]

    def preimage(self, box: Box) -> Box:
        """The box of the stored sample that becomes this box of the augmented one.

        >>> View(Box((-1,), (7,)), (True,)).preimage(Box((0,), (3,)))
        Box(starts=(4,), stops=(7,))
        """
        starts, stops = [], []
        for dim, mirrored in enumerate(self.mirrored):
            start, stop = box.starts[dim], box.stops[dim]
            if mirrored:
                size = self.window.stops[dim] - self.window.starts[dim]
                start, stop = size - stop, size - start
            starts.append(self.window.starts[dim] + start)
            stops.append(self.window.starts[dim] + stop)
        return Box(tuple(starts), tuple(stops))

    def of_space(self) -> View:
        """The view without channels: that of a label."""
        return View(Box(self.window.starts[1:], self.window.stops[1:]), self.mirrored[1:])


def look(
    read: Callable[[Box], np.ndarray], shape: tuple[int, ...], view: View, box: Box, out: np.ndarray
) -> None:
    """Puts a box of a view of a sample into `out`, which holds the padding already."""
    wanted = view.preimage(box)
    inside = wanted.intersect(Box.whole(shape))
    if inside.empty:
        return
    mirror = tuple(slice(None, None, -1 if mirrored else 1) for mirrored in view.mirrored)
    out[mirror][inside.slices_in(wanted)] = read(inside)


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
        return Augment((), self.size, 0, self.mean, self.std, random=False)

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

    def views(self, shape: tuple[int, ...], num_samples: int, seed: int, epoch: int) -> Views:
        """The views of an epoch, by the number of the sample."""
        bits = random_bits(num_samples, seed, epoch, AUGMENT) if self._chooses else None
        return Views(self, shape, bits)

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


@dataclass(frozen=True)
class Views:
    """The view of every sample of an epoch."""

    augment: Augment
    shape: tuple[int, ...]
    bits: np.ndarray | None

    def __getitem__(self, index: int) -> View:
        bits = int(self.bits[index]) if self.bits is not None else None
        starts, stops, mirrored = [0], [self.shape[0]], [False]
        size = self.augment.out_shape(self.shape)[1:]
        for dim, (inner, outer) in enumerate(zip(size, self.shape[1:], strict=True)):
            start, flipped = self._choice(dim, inner, outer, bits)
            starts.append(start)
            stops.append(start + inner)
            mirrored.append(flipped)
        return View(Box(tuple(starts), tuple(stops)), tuple(mirrored))

    def _choice(self, dim: int, inner: int, outer: int, bits: int | None) -> tuple[int, bool]:
        """Where the window starts in this dim, and whether it is mirrored."""
        if bits is None:
            return (outer - inner) // 2, False
        padding, flip = self.augment.padding, self.augment.flip
        own = bits >> dim * (BITS_PER_DIM + 1)
        num_places = outer + 2 * padding - inner + 1
        place = ((own >> 1) & (2**BITS_PER_DIM - 1)) * num_places >> BITS_PER_DIM
        return place - padding, bool(flip and flip[dim] and own & 1)


def flips(text: Sequence[str], num_space: int) -> tuple[bool, ...]:
    """Which dims of space are meant by the letters d, h and w.

    >>> flips("w", 2)
    (False, True)
    """
    letters = "dhw"[-num_space:]
    if not set(text) <= set(letters):
        raise ShardwiseError(f"flip={''.join(text)!r} must be made of {', '.join(letters)}")
    return tuple(letter in text for letter in letters)
