"""A rank that is killed while all save: a complete checkpoint is always left."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from pool import WorkerPool
from saving import Net, make_plan, start, train
from shardwise import LostPeer, Plan
from shardwise.checkpoint import Checkpoints
from shardwise.checkpoint.manifest import NAME, Document
from shardwise.checkpoint.step_folders import HIDDEN, StepFolders
from shardwise.checkpoint.weight_files import read_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    folders.tidy()  # as the next save does
    assert not [p for p in folders.folder.iterdir() if p.name.startswith(HIDDEN)]
