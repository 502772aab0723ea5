"""The loader: each rank reads its box of every global batch, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box

from .augment import Augment, Views
from .order import Batches, mixing_share
from .source import Source

IGNORED = -100  # the class of padding, which torch's losses pass over
BoxOf = Callable[[int], Box]
T = TypeVar("T")
END: Any = object()


@dataclass(frozen=True)
class Batch:
    """A rank's part of a global batch."""

    x: torch.Tensor  # float32: the rank's box of the samples
    y: torch.Tensor  # int64: the labels of all samples, or a box of labels that are volumes
    indices: tuple[int, ...]  # the samples of the whole batch
    epoch: int
    mixed: torch.Tensor | None = None  # labels of the samples that were mixed in
    share: float = 1.0  # of a sample's own numbers, where others were mixed in

    @property
    def size(self) -> int:
        """Samples of the global batch."""
        return len(self.indices)


class Loader:
    """The batches of an epoch, as this rank's boxes, read ahead in the background.

    `box` gives the rank's box of a global batch of so many samples, such as a parallel model's
    `input_box`; without it a rank reads whole batches. Labels that are volumes have a box of their
    own, `label_box`. With `mixup`, every sample is mixed with its neighbour in the batch, by a
    share drawn from Beta(mixup, mixup). Iterating goes to the end of the epoch; the next time, the
    next one follows.

    >>> from shardwise.data import digits
    >>> loader = Loader(digits(), batch=64, box=lambda n: Box((0, 0, 0, 0), (n, 1, 5, 5)))
    >>> next(iter(loader)).x.shape
    torch.Size([64, 1, 5, 5])
    """

    def __init__(
        self,
        source: Source,
        batch: int,
        *,
        box: BoxOf | None = None,
        label_box: BoxOf | None = None,
        augment: Augment | None = None,
        mixup: float = 0.0,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        self.source, self.augment = source, augment or Augment()
        self.augment.check(source.shape)
        if prefetch < 0:
            raise ShardwiseError(f"prefetch={prefetch} must be at least 0")
        if mixup < 0 or (mixup and source.label_shape):
            raise ShardwiseError(f"mixup={mixup} must be at least 0, and 0 for labels per voxel")
        self.shape = self.augment.out_shape(source.shape)
        self.label_shape = self.shape[1:] if source.label_shape else ()
        self.batches = Batches(len(source), batch, seed, shuffle, drop_last)
        self.mixup, self.prefetch, self.device = mixup, prefetch, torch.device(device)
        self._box = box or (lambda num: Box.whole((num, *self.shape)))
        self._label_box = label_box or (lambda num: Box.whole((num, *self.label_shape)))

    def __len__(self) -> int:
        """How many batches of this epoch are left."""
        return len(self.batches)

    @property
    def epoch(self) -> int:
        return self.batches.epoch

    @property
    def bytes_read(self) -> int:
        """By this rank so far, what was read ahead included."""
        return self.source.bytes_read

    def state_dict(self) -> dict[str, int]:
        """Where the run stands: after the batch that was given out last."""
        return self.batches.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.batches.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        batches = list(self.batches.remaining())
        # Asked for here and not on the thread: a model that finds its boxes is not thread-safe.
        boxes = {num: self._boxes(num) for num in {len(indices) for indices in batches}}
        epoch = self.epoch
        bits = self.augment.chances(len(self.source), self.batches.seed, epoch)
        shares = self._shares(batches, epoch)
        parts = (
            self._read(indices, *boxes[len(indices)], bits, epoch, share)
            for indices, share in zip(batches, shares, strict=True)
        )
        ahead = prefetched(parts, self.prefetch) if self.prefetch else parts
        with closing(ahead):
            yield from self._given_out(ahead)
        self.batches.next_epoch()

    def _shares(self, batches: list[np.ndarray], epoch: int) -> list[float]:
        """How much of its own each batch keeps, by its place in the epoch."""
        if not self.mixup:
            return [1.0] * len(batches)
        places = self.batches.position + np.cumsum([0, *map(len, batches)])
        seed = self.batches.seed
        return [mixing_share(self.mixup, seed, epoch, int(at)) for at in places[:-1]]

    def _given_out(self, parts: Iterator[Batch]) -> Iterator[Batch]:
        """Counts what leaves the loader, so that a run that stops here misses nothing."""
        for part in parts:
            self.batches.position += part.size
            yield self._on_device(part)

    def _boxes(self, num: int) -> tuple[Box, Box]:
        found = self._box(num), self._label_box(num)
        for box, shape in zip(found, (self.shape, self.label_shape), strict=True):
            if not Box.whole((num, *shape)).contains(box) or len(box.starts) != 1 + len(shape):
                raise ShardwiseError(
                    f"{box} is not inside a batch of {'x'.join(map(str, (num, *shape)))}"
                )
        return found

    # -- on the thread -------------------------------------------------------------------------

    def _read(
        self,
        indices: np.ndarray,
        box: Box,
        label_box: Box,
        bits: np.ndarray | None,
        epoch: int,
        share: float,
    ) -> Batch:
        x, y = self._samples(indices, box, label_box, bits)
        numbers, mixed = tuple(indices.tolist()), None
        if self.mixup:  # this rank's box of the neighbours is read too, so that nothing is sent
            other, labels = self._samples(np.roll(indices, 1), box, label_box, bits)
            x = np.float32(share) * x + np.float32(1 - share) * other
            mixed = self._tensor(labels)
        return Batch(self._tensor(x), self._tensor(y), numbers, epoch, mixed, share)

    def _samples(
        self, indices: np.ndarray, box: Box, label_box: Box, bits: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Boxes of some samples and of their labels."""
        source = self.source
        chosen = bits[indices] if bits is not None else None
        views = self.augment.views(source.shape, len(indices), chosen)
        numbers = indices.tolist()
        x = np.zeros(_size(box), source.dtype)
        _gather(x, source.read, source.expect, numbers, views, box)
        x = self.augment.normalised(x, source.scale, slice(box.starts[1], box.stops[1]))
        y = np.full(_size(label_box), IGNORED, np.int64)
        if self.label_shape:
            _gather(y, source.label, source.expect_label, numbers, views.of_space(), label_box)
        else:
            y[:] = [source.label(n) for n in numbers[label_box.starts[0] : label_box.stops[0]]]
        return x, y

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        """Page-locked only where it will be copied to an accelerator."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _on_device(self, part: Batch) -> Batch:
        def there(tensor: Any) -> Any:
            return None if tensor is None else tensor.to(self.device, non_blocking=True)

        return replace(part, x=there(part.x), y=there(part.y), mixed=there(part.mixed))


def _size(box: Box) -> list[int]:
    return [max(0, size) for size in box.shape]


def _gather(
    out: np.ndarray,
    read: Callable[[int, Box], Any],
    expect: Callable[[int, Box], None],
    numbers: list[int],
    views: Views,
    box: Box,
) -> None:
    """Puts a box of a batch, of samples or of labels, into `out`, which is padding so far."""
    if out.size == 0:
        return
    samples = slice(box.starts[0], box.stops[0])
    chosen = numbers[samples]
    looks = list(views[samples].looks(Box(box.starts[1:], box.stops[1:])))
    for index, look in zip(chosen, looks, strict=True):
        if look is not None:
            expect(index, look.box)
    for index, look, part in zip(chosen, looks, out, strict=True):
        if look is not None:
            look.put(read(index, look.box), part)


def prefetched(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The items of an iterator, of which up to `depth` are made before they are asked for.

    What the iterator raises is raised where the item would have come. Closing this ends the thread,
    after the item that it is making.

    >>> list(prefetched(iter("abc"), depth=2))
    ['a', 'b', 'c']
    """
    with ThreadPoolExecutor(1, "shardwise-prefetch") as thread:
        ahead = deque(thread.submit(next, items, END) for _ in range(depth))
        try:
            while (item := ahead.popleft().result()) is not END:
                ahead.append(thread.submit(next, items, END))
                yield item
        finally:
            thread.shutdown(cancel_futures=True)
