"""Mutated checkpoints: an error that names the file, or the right state; no other error."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from mutations import mutate
from pool import shared_pool
from saving import make_plan, start, train
from shardwise import Plan, ShardwiseError
from shardwise.checkpoint import Checkpoints, export

ROUNDS = 160
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
JUNK: list[Any] = [None, -1, 2**70, 1e308, True, "x", "../rank-0.bin", [], {}, [[]], {"a": 1}]


def _save(folder: Path, plan: Plan) -> None:
    model, stepper = start(plan, "adamw")
    train(model, stepper, range(2))
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, model, stepper, {"at": 2})
    checkpoints.wait()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint of two workers."""
    folder = tmp_path_factory.mktemp("run")
    shared_pool(2).run(_save, folder / "checkpoints", make_plan(2, 4))
    return folder


def _state(model: Any, stepper: Any) -> list[torch.Tensor]:
    kept = stepper.state_dict()["state"].values()
    tensors = [*model.parameters(), *model.buffers(), *(t for own in kept for t in own.values())]
    return [tensor.detach().clone() for tensor in [*tensors, torch.get_rng_state()]]


@pytest.mark.timeout(120)
def test_a_mutated_checkpoint_gives_the_right_state_or_none(right: Path, tmp_path: Path) -> None:
    model, stepper = start(make_plan(1, 0), "adamw")
    Checkpoints(right / "checkpoints").load(model, stepper)
    wanted = _state(model, stepper)
    counts = {"refused": 0, "loaded": 0}
    run = tmp_path / "run"
    for round_ in range(ROUNDS):
        rng = np.random.default_rng((5, round_))
        shutil.copytree(right, run)
        done = mutate(run, rng)
        train(model, stepper, [round_])
        before = _state(model, stepper)
        try:
            progress = Checkpoints(run / "checkpoints").load(model, stepper)
        except ShardwiseError as error:
            assert str(run) in str(error) and "\n" not in str(error), done
            pairs = zip(_state(model, stepper), before, strict=True)
            counts["refused"] += 1
        else:
            assert progress == {"at": 2}, done
            pairs = zip(_state(model, stepper), wanted, strict=True)
            counts["loaded"] += 1
        assert all(torch.equal(own, other) for own, other in pairs), done
        shutil.rmtree(run)
    assert counts["refused"] > ROUNDS // 2, counts


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """All places of a document: a container and a key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            found += _nodes(inner)
    return found


@pytest.mark.timeout(120)
def test_a_forged_document_with_its_checksum_ends_in_one_sentence(
    right: Path, tmp_path: Path
) -> None:
    """Anybody can compute a checksum: fields of the wrong kind are found out all the same."""
    model, stepper = start(make_plan(1, 0), "adamw")
    run, refused = tmp_path / "run", 0
    shutil.copytree(right, run)
    path = run / "checkpoints/step-00000002/checkpoint.json"
    document = json.loads(path.read_text())
    del document["crc32"]
    for round_ in range(ROUNDS):
        rng = np.random.default_rng((6, round_))
        forged = copy.deepcopy(document)
        nodes = _nodes(forged)
        container, key = nodes[rng.integers(len(nodes))]
        if rng.random() < 0.2 and isinstance(container, dict):
            del container[key]
        else:
            container[key] = copy.deepcopy(JUNK[rng.integers(len(JUNK))])
        content = json.dumps(forged, sort_keys=True, separators=(",", ":")).encode()
        path.write_text(json.dumps({**forged, "crc32": crc32(content)}))
        for action in (
            lambda: Checkpoints(run / "checkpoints").load(model, stepper),
            lambda: export(run, tmp_path / "model.pt"),
        ):
            try:
                action()
            except ShardwiseError as error:
                assert str(run) in str(error) and "\n" not in str(error), (container, key)
                refused += 1
    assert refused > ROUNDS, refused
