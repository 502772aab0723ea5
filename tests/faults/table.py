"""The fault matrix as data: what happens to one rank, where, and how all of them must end."""

from __future__ import annotations

from dataclasses import dataclass

FAULTS = {
    "kill": "kill -9",
    "stop": "SIGSTOP: it is there, and does nothing",
    "cut": "its connections to all others are shut down",
    "slow": "it takes half the timeout",
    "exception": "it raises an exception that nobody expects",
    "full": "the disk is full",
    "torn": "a write stops half way, or a file is cut off",
    "memory": "no memory is left",
}
PLACES = {
    "start": "all agree on the run's folder and plan",
    "forward": "an exchange between layers",
    "statistics": "the sum of a batch norm's statistics",
    "gradients": "the sum of gradients",
    "metrics": "rank 0 writes a line of metrics",
    "checkpoint": "all write their part of a checkpoint",
    "export": "a checkpoint becomes a plain file",
    "resume": "all read a checkpoint",
    "data": "samples are read in the background",
}
FIRST_ONLY = ("metrics", "export")  # what rank 0 does alone
ALONE = ("export",)  # one process, without others

MESSAGES = ("forward", "statistics", "gradients")

_UNWRITTEN = "nothing is written there"
_ALONE = "one process does it, and no other waits for it"
SENSELESS = {
    **{(f, p): _UNWRITTEN for f in ("full", "torn") for p in ("start", *MESSAGES)},
    **{(fault, "export"): _ALONE for fault in ("stop", "cut", "slow")},
    ("full", "data"): _UNWRITTEN,
}
WHERE = {  # what a sentence about a rank that is gone says of the place
    "start": "agree on",
    "forward": "(exchange|gather) of (conv|mean|head)",
    "statistics": "statistics",
    "gradients": "gradient",
    "checkpoint": "in the ",  # it is written while all compute
    "resume": "checkpoints/step",
    "metrics": "in the ",
    "data": "in the ",
}


@dataclass(frozen=True)
class Cell:
    """A fault at a place; the victim, and at which chance it strikes, come from a seed."""

    fault: str
    place: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.fault}-{self.place}"

    def victim(self, world: int) -> int:
        first = self.place in FIRST_ONLY or (self.fault, self.place) == ("full", "resume")
        return 0 if first else (self.seed * 7 + len(str(self))) % world

    @property
    def chance(self) -> int:
        """At which of the occasions, counted from 1."""
        return 1 + (self.seed + len(str(self))) % 2

    @property
    def dies(self) -> bool:
        """Whether the victim does not live on; half a write is followed by a kill."""
        return self.fault == "kill" or (self.fault == "torn" and not self.damaged)

    @property
    def damaged(self) -> bool:
        """Whether a file is cut off before the run: nothing strikes later."""
        return self.fault == "torn" and self.place in ("resume", "export", "data")

    @property
    def ends(self) -> str:
        """How survivors end: they are "done", or raise a "sentence"."""
        return "done" if self.fault == "slow" else "sentence"

    def pattern(self, world: int) -> str:
        """What the sentence of every survivor must match; the victim, where it lives, too."""
        rank = self.victim(world)
        if self.fault == "stop" or self.dies:
            # A checkpoint may be under way beside these, and be the first to notice.
            saving = "|the checkpoint of step" if self.place in MESSAGES else ""
            return rf"waited in vain for .*\b{rank}\b.*({WHERE[self.place]}{saving})"
        if self.fault == "cut":
            return r"rank \d waited in vain for ranks? \d"
        if self.fault == "exception":
            return rf"rank {rank}\b.*a fault of the test"
        if self.fault == "memory":
            return r"out of memory|MemoryError|not enough memory"
        return (
            r"No space left on device" if self.fault == "full" else r"damaged|bytes|cannot be read"
        )


def cells(seed: int = 0) -> list[Cell]:
    """Every cell that makes sense."""
    every = [Cell(fault, place, seed) for place in PLACES for fault in FAULTS]
    return [cell for cell in every if (cell.fault, cell.place) not in SENSELESS]
