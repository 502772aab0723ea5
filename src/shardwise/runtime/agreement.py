"""What all ranks must agree on before a pass: compared every time, in one small message.

Ranks that disagree would send each other messages of other sizes, or train on other samples without
a word. Each rank sends a few numbers to all others; who differs from the first is named to all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.comm import AGREEMENT, Communicator
from shardwise.errors import ShardwiseError, one_line

LOOKED_AT = 1 << 16  # elements of a tensor that its checksum is made of


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do, as numbers."""

    samples: int = 0
    training: int = 0
    gradients: int = 0
    whole: int = 0  # inputs are whole, not parts
    modes: int = 0  # of all modules
    attributes: int = 0  # of modules, that forward reads
    trained: int = 0  # which parameters, and which inputs need gradients
    kinds: int = 0  # dtypes of inputs, and shapes of the whole ones
    content: int = 0  # of whole inputs
    autocast: int = 0  # what torch.autocast lowers to
    refused: int = 0  # this rank cannot do it

    @classmethod
    def of(
        cls,
        inputs: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...]],  # of the whole inputs
        *,
        whole: bool,
        modes: Sequence[bool],  # of all modules, the whole model first
        looks: Any,
        trained: Sequence[str],
        autocast: torch.dtype | None,
    ) -> Intent:
        return cls(
            samples=next((shape[0] for shape in shapes if shape), 0),
            training=modes[0],
            gradients=torch.is_grad_enabled(),
            whole=whole,
            modes=checksum(modes),
            attributes=checksum(looks),
            trained=checksum([[*trained], [x.requires_grad for x in inputs]]),
            kinds=checksum([[x.dtype for x in inputs], [*shapes]]),
            content=checksum([checksum(x) for x in inputs]) if whole else 0,
            autocast=checksum(str(autocast)),
        )

    def __str__(self) -> str:
        return (
            f"a batch of {self.samples} samples{'' if self.whole else ' in parts'} in "
            f"{'training' if self.training else 'evaluation'}"
            f"{'' if self.gradients else ' without gradients'}"
        )

    def difference(self, first: Intent, whose: str) -> str:
        """What sets this rank's call apart from that of the first; nothing where they are alike."""
        if str(self) != str(first):
            return f"runs {self}, and {whose} {first}; all ranks must do the same"
        if self.modes != first.modes:
            return f"has other modules in training mode than {whose}"
        if self.attributes != first.attributes:
            return f"has other attributes of its modules than {whose}; all ranks must set the same"
        if self.trained != first.trained:
            return f"has other parameters or inputs that require gradients than {whose}"
        if self.kinds != first.kinds:
            return f"was given inputs of another shape or dtype than {whose}"
        if self.autocast != first.autocast:
            return f"runs under another torch.autocast than {whose}"
        if self.content != first.content:
            return (
                f"was given another batch than {whose}; give every rank the same global batch, or "
                "each its own part with batch="
            )
        return ""


class Disagreement(ShardwiseError):
    """What ranks do not have in common; raised on all of them, so that they stay in step."""


def agree_to_start(refusal: Exception | None, facts: Mapping[str, str], comm: Communicator) -> None:
    """Raises on all ranks where one cannot start, or has other facts than the first."""
    reason = "" if refusal is None else str(refusal) or one_line(refusal)
    first, *others = everyone = comm.gather_objects((reason, facts))
    refusing = [rank for rank, (reason, _) in enumerate(everyone) if reason]
    if refusal is not None:
        raise refusal
    if refusing:
        raise Disagreement(f"{_name(refusing[0], comm)} refuses: {everyone[refusing[0]][0]}")
    for rank, (_, other) in enumerate(others, start=1):
        for name, fact in other.items():
            if fact != first[1][name]:
                own, whose = _name(rank, comm), _name(0, comm)
                raise Disagreement(f"{own} was started with another {name} than {whose}")


def agree(call: Intent, refusal: Exception | None, comm: Communicator) -> None:
    """Raises on all ranks where one cannot run its call, or is about to run another than others."""
    if comm.size > 1:
        calls = [Intent(*row) for row in gather_numbers(astuple(call), comm)]
        refusing = [rank for rank, other in enumerate(calls) if other.refused]
        if refusing:
            reasons = comm.gather_objects(str(refusal or ""))
            if refusal is None:
                reason = reasons[refusing[0]]
                raise Disagreement(f"{_name(refusing[0], comm)} refuses: {reason}")
        for rank, other in enumerate(calls if not refusing else ()):
            difference = other.difference(calls[0], _name(0, comm))
            if difference:
                raise Disagreement(f"{_name(rank, comm)} {difference}")
    if refusal is not None:
        raise refusal


def agree_on(number: int, otherwise: str, comm: Communicator) -> None:
    """Raises on every rank where one "loads another state", say: its number is not the first's."""
    if comm.size > 1:
        (first,), *others = gather_numbers((number,), comm)
        for rank, (other,) in enumerate(others, start=1):
            if other != first:
                raise Disagreement(f"{_name(rank, comm)} {otherwise} than {_name(0, comm)}")


def _name(rank: int, comm: Communicator) -> str:
    """How all processes know a rank, which in a group may have another number."""
    return f"rank {comm.global_rank(rank)}"


def gather_numbers(numbers: Sequence[int], comm: Communicator) -> list[list[int]]:
    """Every rank's numbers, in rank order."""
    return start_gathering(torch.tensor(numbers, dtype=torch.int64), comm)()


def start_gathering(own: torch.Tensor, comm: Communicator) -> Callable[[], list[list[Any]]]:
    """Sends this rank's numbers to all; what it returns waits for every rank's, in rank order."""
    own = own.to("cuda" if comm.backend == "nccl" else "cpu")
    everyone = [torch.empty_like(own) for _ in range(comm.size)]
    pending = comm.all_gather(tuple(range(comm.size)), everyone, own, AGREEMENT)

    def arrive() -> list[list[Any]]:
        pending.wait()
        return torch.stack(everyone).tolist()

    return arrive


def checksum(value: Any) -> int:
    """A number that tells values apart: of a tensor by what it holds, else by how it is written."""
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    x = value.detach()
    if x.numel() > LOOKED_AT:
        x = torch.take(x, places(x.numel(), LOOKED_AT).to(x.device))
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.contiguous().cpu().as_strided((x.numel(),), (1,))  # of one element, strides may be odd
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())


@lru_cache(maxsize=8)
def places(numel: int, count: int) -> torch.Tensor:
    """So many places all over a tensor, by an odd step: they fall into all rows and columns."""
    return torch.arange(0, numel, (numel // count) | 1)


@contextmanager
def together(comm: Communicator, phase: str) -> Iterator[None]:
    """Within, all ranks do this; one that fails tells the others why, which then end at once."""
    if comm.size == 1:
        yield
        return
    try:
        with comm.doing(phase):
            yield
    except Disagreement:
        raise
    except BaseException as error:
        comm.abort(_reason(error))
        raise


def _reason(error: BaseException) -> str:
    """What the others are told."""
    if isinstance(error, MemoryError):
        return str(error) or "it is out of memory"
    return str(error) if isinstance(error, ShardwiseError) else one_line(error)
