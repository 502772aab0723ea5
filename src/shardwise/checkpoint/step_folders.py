"""The folder of a run's checkpoints: one subfolder per step, that appears when it is complete.

A checkpoint is written into a hidden folder, which is renamed when all of it is on the disk. One
that goes is renamed first, so that a half removed one is never taken for a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.files import sync, system_errors_as

COMPLETE = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,9}))?")  # saved again: step-00000010-1
HIDDEN = ".saving-", ".removing-"


class StepFolders:
    """The subfolders of complete checkpoints, and what interrupted saves have left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def complete(self) -> dict[int, Path]:
        """The newest complete checkpoint of every step, in order of the steps."""
        found: dict[int, tuple[int, Path]] = {}
        for path, step, number in self._all():
            if step not in found or number > found[step][0]:
                found[step] = number, path
        return {step: found[step][1] for step in sorted(found)}

    def of_step(self, step: int | None, complete: Mapping[int, Path]) -> Path:
        """The folder of a step, or of the last one, among those that are complete."""
        if not complete:
            raise ShardwiseError(f"{self.folder} has no complete checkpoint")
        if step is None:
            return complete[max(complete)]
        if step not in complete:
            raise ShardwiseError(
                f"{self.folder} has no complete checkpoint of step {step}; there are those of "
                f"{', '.join(map(str, complete))}"
            )
        return complete[step]

    def _all(self) -> Iterator[tuple[Path, int, int]]:
        entries: list[Path] = []
        with system_errors_as(f"{self.folder} cannot be read"), suppress(FileNotFoundError):
            entries = list(self.folder.iterdir())
        for path in entries:
            match = COMPLETE.fullmatch(path.name)
            if match and path.is_dir():
                yield path, int(match[1]), int(match[2] or 0)

    def temporary(self, step: int, token: str) -> Path:
        return self.folder / f"{HIDDEN[0]}{step:08d}-{token}"

    def publish(self, temporary: Path, step: int) -> Path:
        """Makes what was written the checkpoint of this step: all of it, or nothing."""
        numbers = [number for _, known, number in self._all() if known == step]
        again = f"-{max(numbers) + 1}" if numbers else ""
        target = self.folder / f"step-{step:08d}{again}"
        sync(temporary)
        os.rename(temporary, target)
        sync(self.folder)
        return target

    def prune(self, keep: int, newest: Path) -> None:
        """Removes all but the last few, and those that were replaced; never the one just made."""
        last = set(list(self.complete().values())[-keep:]) | {newest}
        for path in [path for path, _, _ in self._all() if path not in last]:
            with suppress(OSError):
                os.rename(path, self.folder / f"{HIDDEN[1]}{path.name}")
        self.tidy()

    def tidy(self) -> None:
        """Removes what interrupted saves have left: only who writes here knows that they are."""
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name.startswith(HIDDEN):
                    shutil.rmtree(path, ignore_errors=True)

    def writing(self) -> AbstractContextManager[None]:
        """A full disk, and whatever else the system refuses, becomes one sentence."""
        return system_errors_as(f"a checkpoint cannot be written to {self.folder}")
