"""What ranks go into a backward pass with: all compare it, in one message that backward hides.

Every rank computes the loss by itself, from the same output. So the gradient of the output must be
the same on all ranks, up to what machines of another kind round otherwise; where it is not, labels,
weights or random numbers of the loss were others, and each rank would train on another loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isnan
from typing import Any

import torch

from shardwise.comm import Communicator
from shardwise.runtime.agreement import Disagreement, places, start_gathering

LOOKED_AT = 1 << 18  # elements of a gradient that are compared
TOLERANCE = 1e-3  # of the norm: another label changes more, other machines less
HALF_TOLERANCE = 3e-2  # where gradients have 16 bits
FIELDS = 3  # numbers of each output: whether it has a gradient, its norm, its projection


class LossAgreement:
    """What this rank goes into backward with, and what all others do, once it is asked for."""

    def __init__(
        self, gradients: Sequence[Any], holds: bool, same_loss: bool, comm: Communicator
    ) -> None:
        """`holds` says that this rank would leave the sums of gradients for later."""
        self.holds, self.same_loss, self.comm = holds, same_loss, comm
        self._gradients, self._rows = gradients, None
        self._arrive: Callable[[], list[list[float]]] | None = None
        if comm.size > 1:
            own = [number for g in gradients for number in _numbers(g, same_loss)]
            self._arrive = start_gathering(_packed([float(holds), *own]), comm)

    def rows(self) -> list[list[float]]:
        """The numbers of all ranks, of which there is none where a rank is alone."""
        if self._arrive is not None:
            self._rows, self._arrive = self._arrive(), None
        return self._rows or []

    def all_hold(self) -> bool:
        """Whether all ranks leave the sums for later; one that does not need not ask others."""
        return self.holds and all(row[0] for row in self.rows())

    def used(self) -> list[bool]:
        """Which outputs the loss depends on, that of any rank; one output is always used."""
        here = [gradient is not None for gradient in self._gradients]
        if len(here) == 1 or not self.rows():
            return here
        return [any(row[1 + FIELDS * i] for row in self.rows()) for i in range(len(here))]

    def check(self) -> None:
        """Raises on all ranks where the losses of two are not the same."""
        first, *others = self.rows() or [[]]
        whose = f"rank {self.comm.global_rank(0)}"
        for rank, row in enumerate(others if self.same_loss else (), start=1):
            own = f"rank {self.comm.global_rank(rank)}"
            if row[1::FIELDS] != first[1::FIELDS]:
                raise Disagreement(
                    f"the loss of {own} depends on other outputs than that of {whose}; every rank "
                    "must compute the same loss"
                )
            for index, gradient in enumerate(self._gradients):
                place = slice(2 + FIELDS * index, 1 + FIELDS * (index + 1))
                if gradient is not None and not _alike(row[place], first[place], gradient.dtype):
                    raise Disagreement(
                        f"the loss of {own} is another than that of {whose}, though the "
                        "output is the same; give every rank the labels of the whole batch, and "
                        "compute the same loss of them"
                    )


def _alike(one: list[float], other: list[float], dtype: torch.dtype) -> bool:
    """Whether two norms are the same, and two projections, up to rounding."""
    size = max(one[0], other[0])
    tolerance = TOLERANCE if dtype.itemsize > 2 else HALF_TOLERANCE
    allowed = tolerance * size + torch.finfo(dtype).eps  # gradients of nearly nothing are noise
    pairs = zip(one, other, strict=True)
    return all(a == b or (isnan(a) and isnan(b)) or abs(a - b) <= allowed for a, b in pairs)


def _numbers(gradient: Any, look: bool) -> list[Any]:
    """Whether there is a gradient, its norm, and its sum with signs that look random."""
    if gradient is None or not look or not gradient.numel():
        return [float(gradient is not None), 0.0, 0.0]
    x = gradient.detach()
    x = torch.view_as_real(x) if x.is_complex() else x
    if x.numel() > LOOKED_AT:
        x = torch.take(x, places(x.numel(), LOOKED_AT).to(x.device))
    x = x.reshape(-1)
    x = x.float() if x.element_size() < 4 else x
    return [1.0, torch.linalg.vector_norm(x), x.dot(_signs(x.numel(), x.dtype, x.device))]


def _packed(numbers: list[Any]) -> torch.Tensor:
    """As one tensor, on their device: nobody waits for a GPU here."""
    device = next((n.device for n in numbers if isinstance(n, torch.Tensor)), None)
    if device is None or device.type == "cpu":
        return torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    kind = {"dtype": torch.float64, "device": device}
    return torch.stack([torch.as_tensor(number, **kind) for number in numbers])


@lru_cache(maxsize=8)
def _signs(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    drawn = torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(numel))
    return (2 * drawn - 1).to(device, dtype)
