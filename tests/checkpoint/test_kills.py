"""Processes that are killed while they save: a complete checkpoint is always left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import WorkerPool
from saving import Net, make_plan, start, train
from shardwise import LostPeer, Plan
from shardwise.checkpoint import Checkpoints, writer
from shardwise.checkpoint.document import NAME, Document
from shardwise.checkpoint.export import read_state
from shardwise.checkpoint.folder import HIDDEN, StepFolders

SAVES = 3
STRIDE = 4  # of the moments: all of them take a minute
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# -- one worker, at every moment of its saves ------------------------------------------------------


class Moments:
    """Kills this process at the n-th thing that it does to the files of a folder."""

    def __init__(self, last: int, folder: Path) -> None:
        self.left, self.folder = last, str(folder)
        sys.addaudithook(self._watch)
        write, sync = writer._write, os.fsync

        def slow_write(file: Any, content: memoryview) -> None:
            write(file, content[: len(content) // 2])
            self.pass_by()
            write(file, content[len(content) // 2 :])

        def slow_sync(handle: int) -> None:
            self.pass_by()
            sync(handle)

        writer._write, os.fsync = slow_write, slow_sync

    def _watch(self, event: str, args: tuple[Any, ...]) -> None:
        if any(isinstance(a, (str, Path)) and str(a).startswith(self.folder) for a in args):
            self.pass_by()

    def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(folder: Path, moment: int, model: Any, stepper: Any, pipe: int) -> None:
    """Tells of every save that was complete."""
    checkpoints = Checkpoints(folder, keep=1)
    Moments(moment, folder)
    for step in range(SAVES):
        train(model, stepper, [step])
        checkpoints.save(step, model, stepper, {"at": step})
        checkpoints.wait()
        os.write(pipe, b".")


def drive(folder: Path, stride: int) -> None:
    """One process per moment, forked when all is ready but nothing is saved."""
    model, stepper = start(make_plan(1, 0), "momentum")
    wanted = []
    for step in range(SAVES):
        train(model, stepper, [step])
        wanted.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    model, stepper = start(make_plan(1, 0), "momentum")
    moment, killed = 1, True
    while killed:
        assert moment < 2000
        run, (here, there) = folder / str(moment), os.pipe()
        pid = os.fork()
        if pid == 0:
            save_until_killed(run, moment, model, stepper, there)
            os._exit(0)
        os.close(there)
        told = 0
        while os.read(here, 1):
            told += 1
        os.close(here)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        check_folder(run, told, wanted)
        moment += stride
    print(f"killed at {moment // stride} moments", flush=True)


def check_folder(folder: Path, told: int, wanted: list[dict[str, torch.Tensor]]) -> None:
    complete = StepFolders(folder).complete()
    assert max(complete, default=-1) in (told - 1, told)
    for step, path in complete.items():
        assert Document.load(path / NAME).progress == {"at": step}
        for name, tensor in read_state(path).items():
            assert torch.equal(tensor, wanted[step][name]), (folder, step, name)
    Checkpoints(folder)
    if folder.exists():
        assert not [path for path in folder.iterdir() if path.name.startswith(HIDDEN)]


if __name__ == "__main__":
    drive(Path(sys.argv[1]), int(sys.argv[2]))


def test_killed_at_any_moment_the_last_complete_checkpoint_stays(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    job = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(tmp_path), str(STRIDE)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    assert int(job.stdout.split()[2]) > 20, job.stdout


# -- several workers, of which one dies at a random moment -----------------------------------------


def save_for_ever(folder: Path, plan: Plan) -> str:
    """All numbers of a checkpoint are those of its step, so that a mixture would be seen."""
    model, stepper = start(plan, "momentum")
    train(model, stepper, range(1))
    checkpoints = Checkpoints(folder)
    try:
        for step in range(100_000):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(step)
            checkpoints.save(step, model, stepper, {"at": step})
    except LostPeer as error:
        return str(error)
    return ""


ROUNDS = [0, 1, *(pytest.param(number, marks=pytest.mark.deep) for number in range(2, 12))]


@pytest.mark.parametrize("number", ROUNDS)
def test_when_a_rank_is_killed_the_others_say_so_and_the_last_checkpoint_stays(
    tmp_path: Path, number: int
) -> None:
    victim, chance = number % 2, random.Random(number)
    workers, folders = WorkerPool(2), StepFolders(tmp_path / "checkpoints")
    try:
        for connection in workers._connections:
            connection.send((save_for_ever, (folders.folder, make_plan(2, number))))
        deadline = time.monotonic() + 60
        while not folders.complete() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.1)
        workers._processes[victim].kill()
        survivor = workers._connections[1 - victim]
        assert survivor.poll(30)
        kind, said = survivor.recv()
    finally:
        workers.stop()
    assert kind == "last result" and f"rank {1 - victim} waited in vain for rank {victim}" in said
    step, path = max(folders.complete().items())
    assert Document.load(path / NAME).progress == {"at": step}
    params = {name for name, _ in Net().named_parameters(remove_duplicate=False)}
    for name, tensor in read_state(path).items():
        assert name not in params or (tensor == step).all(), name
    Checkpoints(folders.folder)
    assert not [p for p in folders.folder.iterdir() if p.name.startswith(HIDDEN)]
