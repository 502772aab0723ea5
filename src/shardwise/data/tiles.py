"""Tiles: how a packed array is laid out, so that a box of it is read, and checked, in part.

An array is cut into equal tiles (those at the ends filled up with zeros), kept one after the other
in row-major order of the grid. Then come checksums: one of the whole, and one of each tile if there
are several. Each starts from a number of its own, so that a tile or a sample in another's place is
found out as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from zlib import crc32

import numpy as np

from shardwise.geometry.box import Box

CHECKSUM = np.dtype("<u4")
PAGE_BYTES = 4096  # what a disk reads at once: a smaller array is one tile
TILES_PER_DIM = 32  # half of a dimension and a halo of up to a tile: 17 of 32, 28 % of a plane
MIN_TILE_BYTES = 64  # so that checksums are at most a sixteenth of the data


class Damaged(Exception):
    """Data that does not have its checksum."""


def tile_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The tile for samples of this shape (channels x space): all channels, 1/32 of each dimension.

    >>> tile_of((3, 256, 256), 1), tile_of((3, 32, 32), 1)
    ((3, 8, 8), (3, 32, 32))
    """
    if prod(shape) * itemsize <= PAGE_BYTES:
        return shape
    channels, *space = shape
    sides = [-(-size // TILES_PER_DIM) for size in space]
    while channels * prod(sides) * itemsize < MIN_TILE_BYTES:
        sides = [min(side + 1, size) for side, size in zip(sides, space, strict=True)]
    return (channels, *sides)


@dataclass(frozen=True)
class Tiling:
    """The tiles of an array of this shape."""

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    dtype: np.dtype

    @cached_property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-size // side) for size, side in zip(self.shape, self.tile, strict=True))

    @cached_property
    def num_tiles(self) -> int:
        return prod(self.grid)

    @cached_property
    def num_checksums(self) -> int:
        return 1 + (self.num_tiles if self.num_tiles > 1 else 0)

    @cached_property
    def data_bytes(self) -> int:
        return self.num_tiles * prod(self.tile) * self.dtype.itemsize

    @cached_property
    def num_bytes(self) -> int:
        """Of the data and its checksums."""
        return self.data_bytes + self.num_checksums * CHECKSUM.itemsize

    def pack(self, array: np.ndarray, start: int) -> bytes:
        """An array's tiles and their checksums, which start from this number."""
        padded = np.zeros([n * s for n, s in zip(self.grid, self.tile, strict=True)], self.dtype)
        padded[tuple(map(slice, self.shape))] = array
        pairs = [size for pair in zip(self.grid, self.tile, strict=True) for size in pair]
        dims = range(2 * len(self.shape))
        tiles = np.ascontiguousarray(padded.reshape(pairs).transpose(*dims[::2], *dims[1::2]))
        sums = [crc32(tiles.data, start)]
        if self.num_tiles > 1:
            sums += _checksums(tiles, _starts(start, np.arange(self.num_tiles)))
        return tiles.tobytes() + np.array(sums, dtype=CHECKSUM).tobytes()

    def read(self, packed: np.ndarray, box: Box, start: int) -> tuple[np.ndarray, int]:
        """A box out of the bytes that `pack` made, and how many of these had to be read."""
        if box.empty:
            return np.empty(box.shape, self.dtype), 0
        data, sums = packed[: self.data_bytes], packed[self.data_bytes :].view(CHECKSUM)
        whole = self.num_tiles == 1 or box.shape == self.shape
        if whole and crc32(data.data, start) != sums[0]:
            raise Damaged
        if self.num_tiles == 1:
            array = data.view(self.dtype).reshape(self.shape)
            return array[tuple(map(slice, box.starts, box.stops))], packed.nbytes
        tiles = data.view(self.dtype).reshape(self.grid + self.tile)
        if whole:
            return self._joined(tiles, box, (0,) * len(self.grid)), data.nbytes + CHECKSUM.itemsize
        first = tuple(lo // side for lo, side in zip(box.starts, self.tile, strict=True))
        last = tuple(-(-hi // side) for hi, side in zip(box.stops, self.tile, strict=True))
        touched = tuple(map(slice, first, last))
        tiles = np.ascontiguousarray(tiles[touched])
        numbers = self._numbers[touched].ravel()
        if _checksums(tiles, _starts(start, numbers)) != sums[1:][numbers].tolist():
            raise Damaged
        return self._joined(tiles, box, first), tiles.nbytes + CHECKSUM.itemsize * len(numbers)

    def runs(self, box: Box) -> list[tuple[int, int]]:
        """Where in the packed bytes the tiles of a box lie: first and last byte of each run."""
        if box.empty:
            return []
        if self.num_tiles == 1 or box.shape == self.shape:
            return [(0, self.data_bytes)]
        tile_bytes = self.data_bytes // self.num_tiles
        bounds = zip(box.starts, box.stops, self.tile, strict=True)
        touched = self._numbers[tuple(slice(lo // side, -(-hi // side)) for lo, hi, side in bounds)]
        rows = touched.reshape(-1, touched.shape[-1])
        return [(a * tile_bytes, (b + 1) * tile_bytes) for a, b in rows[:, [0, -1]].tolist()]

    @cached_property
    def _numbers(self) -> np.ndarray:
        return np.arange(self.num_tiles).reshape(self.grid)

    def _joined(self, tiles: np.ndarray, box: Box, first: tuple[int, ...]) -> np.ndarray:
        """The box out of its tiles, of which the first is this one of the grid."""
        num_dims = len(self.shape)
        counts = tiles.shape[:num_dims]
        together = [place for dim in range(num_dims) for place in (dim, num_dims + dim)]
        array = tiles.transpose(together).reshape(
            [count * side for count, side in zip(counts, self.tile, strict=True)]
        )
        origin = tuple(number * side for number, side in zip(first, self.tile, strict=True))
        return array[box.slices_in(Box(origin, box.stops))]


def _checksums(tiles: np.ndarray, starts: list[int]) -> list[int]:
    rows = tiles.reshape(len(starts), -1)
    return [crc32(row.data, start) for row, start in zip(rows, starts, strict=True)]


def _starts(start: int, numbers: np.ndarray) -> list[int]:
    """What the checksums of these tiles start from: one more than that of the whole, and so on."""
    return ((start + 1 + numbers) & 0xFFFFFFFF).tolist()
