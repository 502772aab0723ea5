"""What only some ranks do: it works where it needs no messages, else all ranks are told at once."""

from __future__ import annotations

import re
import time
from typing import Any

import torch

from habits.habit import image, net
from shardwise import Plan, ShardwiseError, capture, parallelize
from shardwise.comm import Communicator
from worlds import run_cases

QUICKLY = 10.0  # seconds; messages are given up after 60


def _trains(split: dict[str, int], alone: str) -> tuple[str, float, list[float]]:
    """Three steps; after the first, rank 0 does something that the others do not."""
    plain, x, comm = net(), image(), Communicator()
    model: Any = parallelize(plain, Plan.uniform(capture(plain, x), **split)) if split else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(x + step).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if split and step == 0 and comm.rank == 0:
            begin = time.monotonic()
            try:
                _ALONE[alone](model, x)
            except ShardwiseError as error:
                return str(error), time.monotonic() - begin, losses
    return "", 0.0, losses


def _validate(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)
    model.train()


_ALONE: dict[str, Any] = {
    "saves": lambda model, x: model.state_dict(),
    "validates": _validate,
    "clips": lambda model, x: model.clip_grad_norm_(1.0),
    "trains": lambda model, x: model(x).sum().backward(),
}


def _tells(split: dict[str, int], alone: str) -> tuple[str, float, list[float]]:
    begin = time.monotonic()
    try:
        return _trains(split, alone)
    except ShardwiseError as error:
        return str(error), time.monotonic() - begin, []


def test_rank_0_saves_weights_that_every_rank_has_whole() -> None:
    *_, expected = _trains({}, "saves")
    for ranks in run_cases(_tells, 2, [({"n": 2}, "saves"), ({"h": 2}, "saves")]):
        for refusal, _, losses in ranks:
            assert not refusal
            torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)


SAVING, FORWARD = r"state_dict \('conv.weight'\)", r"the forward pass \('.*'\)"
TOLD = [
    (
        {"f": 2},
        "saves",
        rf"({SAVING}, .*{FORWARD}|{FORWARD}, .*{SAVING}); all ranks must do the same",
    ),
    ({"n": 2}, "validates", "4 samples in training, and rank 0 .* in evaluation without gradients"),
    ({"f": 2}, "validates", "4 samples in training, and rank 0 .* in evaluation without gradients"),
    ({"n": 2}, "clips", r"norms \(.*the forward pass|the forward pass \(.*norms"),
    ({"h": 2}, "trains", "rank 1 was given another batch than rank 0"),
]


def test_what_rank_0_does_alone_is_named_to_all_ranks_at_once() -> None:
    found = run_cases(_tells, 2, [(split, alone) for split, alone, _ in TOLD])
    for (_, _, sentence), ranks in zip(TOLD, found, strict=True):
        for refusal, seconds, _ in ranks:
            assert re.search(sentence, refusal) and seconds < QUICKLY, refusal
