"""`Checkpoints`: saved in the background while training goes on, loaded under any plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from torch.optim import Optimizer

from shardwise.checkpoint.pieces import SavePlanner
from shardwise.checkpoint.snapshot import Restoring, Snapshot
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.checkpoint.together import sentence, torch_together
from shardwise.checkpoint.writer import Writer
from shardwise.comm import AGREEMENT, About, Communicator
from shardwise.errors import ShardwiseError
from shardwise.runtime.parallel import ParallelModel, of

# One thread for all checkpoints of this process: all ranks save in the same order.
_background = ThreadPoolExecutor(1, "checkpoint")
T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run: a folder with one subfolder per step that was saved.

    All ranks make it, and call every method, together. `save` returns as soon as this rank's
    blocks are copied; what goes wrong afterwards is raised by the next `save` or by `wait`.

    >>> checkpoints = Checkpoints("run/checkpoints", keep=3)
    >>> checkpoints.save(100, model, optimizer, {"epoch": 2})
    >>> checkpoints.wait()
    >>> checkpoints.load(model, optimizer)
    {'epoch': 2}
    """

    def __init__(self, folder: str | Path, keep: int = 3, comm: Communicator | None = None) -> None:
        if keep < 1:
            raise ShardwiseError(f"keep={keep}: at least the last checkpoint must be kept")
        self.folders, self.keep, self.comm = StepFolders(Path(folder)), keep, comm or Communicator()
        self._saving: Future[None] | None = None

    # -- saving --------------------------------------------------------------------------------

    def save(
        self, step: int, model: ParallelModel, optimizer: Optimizer, progress: Mapping[str, Any]
    ) -> None:
        """Copies this rank's blocks and writes them in the background; a save under way first ends.

        `progress` is JSON data that `load` returns.
        """
        self.wait()
        self._check_ranks(model)
        of(model).flush()
        of(model).check_values()
        taken: Snapshot | ShardwiseError
        try:
            taken = Snapshot(step, model, optimizer, progress)
        except ShardwiseError as error:
            taken = error  # raised on all ranks, since the others may have found nothing wrong
        group = self.comm.group_of_lane("checkpoint")
        self._saving = _background.submit(self._write, step, taken, group)

    def _write(self, step: int, taken: Snapshot | ShardwiseError, group: Any) -> None:
        writer = Writer(self.folders, self.keep, taken)
        pieces = taken.pieces if isinstance(taken, Snapshot) else {}
        try:
            with torch_together(self.comm, f"the checkpoint of step {step}"):
                dcp.save(
                    pieces,
                    storage_writer=writer,
                    planner=SavePlanner(),
                    process_group=group,
                    no_dist=self.comm.size == 1,
                )
        except BaseException:
            writer.give_up()
            raise

    def wait(self) -> None:
        """Returns when the save under way is complete; raises what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    # -- loading -------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        self.wait()
        return max(self._agree(self.folders.complete, str(self.folders)), default=None)

    def load(
        self, model: ParallelModel, optimizer: Optimizer | None, step: int | None = None
    ) -> dict[str, Any]:
        """Restores the newest checkpoint, or that of a step; returns the progress saved with it.

        Nothing is changed where anything is wrong with it. Without an optimizer, only the model
        is restored.
        """
        self.wait()
        self._check_ranks(model)
        folder = self.folders.of_step(step, self._agree(self.folders.complete, str(self.folders)))
        of(model).flush()
        read = partial(Restoring, folder, model, optimizer)
        restored = self._agree(read, str(folder), alike=False)
        restored.finish()
        return restored.document.progress

    # -- all ranks together --------------------------------------------------------------------

    def _check_ranks(self, model: ParallelModel) -> None:
        own = of(model).comm
        if own.members() != self.comm.members():
            others = " others" if own.size == self.comm.size else ""
            raise ShardwiseError(
                f"the model runs on {own.size} workers, and its checkpoints on {self.comm.size}"
                f"{others}; give Checkpoints the model's communicator, shardwise.of(model).comm"
            )

    def _agree(self, find: Callable[[], T], what: str, alike: bool = True) -> T:
        """What rank 0 finds, or with alike=False each rank itself; one's error is raised on all."""
        found, wrong = None, None
        if self.comm.rank == 0 or not alike:
            try:
                found = find()
            except Exception as error:  # all ranks must hear of it before they wait for this one
                wrong = sentence(error, what, self.comm.global_rank(self.comm.rank))
        about = AGREEMENT if alike else About(what)  # ranks may know one folder by other names
        told = self.comm.gather_objects((found if alike else None, wrong), about)
        for _, error in told:
            if error is not None:
                raise ShardwiseError(error)
        return told[0][0] if alike else found  # type: ignore[return-value]
