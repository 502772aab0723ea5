"""Parts cut out of a tensor that every rank has whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.geometry.box import Box
from shardwise.geometry.transfer import Slices
from shardwise.tensors import filling, memory_format_of


@dataclass(frozen=True)
class Cutter:
    """A box of a whole tensor, which may reach beyond it, where `fill` is."""

    shape: tuple[int, ...]  # of the part
    whole: tuple[int, ...]
    fill: float
    inside: Slices | None  # what the two have in common, in the whole
    there: Slices | None  # and in the part
    reaches_beyond: bool

    @classmethod
    def of(cls, whole: tuple[int, ...], box: Box, fill: float) -> Cutter:
        all_of_it = Box.whole(whole)
        common = all_of_it.intersect(box)
        if box.empty or common.empty:
            return cls(box.shape, whole, fill, None, None, not box.empty)
        slices = common.slices_in(all_of_it), common.slices_in(box)
        return cls(box.shape, whole, fill, *slices, common != box)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """The part; a view where it does not reach beyond the tensor."""
        if not self.reaches_beyond:
            if self.shape == self.whole:
                return x
            return x.new_empty(self.shape) if self.inside is None else x[self.inside]
        form = memory_format_of(x)
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device, memory_format=form)
        y.fill_(filling(self.fill, x.dtype))
        if self.inside is not None and self.there is not None:
            y[self.there] = x[self.inside]
        return y

    def add(self, gradient: torch.Tensor, whole: torch.Tensor) -> None:
        """The gradient of the part goes back to its place in the whole."""
        if self.inside is not None and self.there is not None:
            whole[self.inside] += gradient[self.there]
