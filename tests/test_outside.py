"""A few cases of other people's test suites, others every day; and that the scoreboard is just."""

from __future__ import annotations

import os
import signal
import time
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("expecttest", reason="torch's own samples need it; `make setup` installs it")

import outside
from outside_cases import case as cases
from outside_cases import convolutions, op_db, programs, trial, workers
from outside_cases.case import Case
from outside_cases.trial import (
    BAD,
    HUNG,
    NOT_RUNNABLE,
    REFUSED,
    RIGHT,
    SLOW,
    TRACEBACK,
    WRONG,
    attempt,
)
from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.runtime.parallel import parallelize

SEED = int(os.environ.get("SHARDWISE_OUTSIDE_SEED", date.today().weekday()))
NUM_CASES, SECONDS = 70, 90
SAMPLED = ["op_db", "modules", "errors", "convolutions", "peers", "programs", "drawn"]


def test_a_sample_that_changes_daily_is_right_or_refused() -> None:
    print(f"SHARDWISE_OUTSIDE_SEED={SEED}")
    end = time.monotonic() + SECONDS
    chunks = [
        chunk
        for name in SAMPLED
        for chunk in outside.chunks_of([name], SEED, False, 400 if name == "op_db" else 40)
    ]
    chunks.sort(key=lambda chunk: cases.number(f"{chunk.group}{SEED}"))
    verdicts = list(workers.run(chunks[:NUM_CASES], 2, lambda: time.monotonic() < end))
    bad = [outside.told(v, True) for v in verdicts if v.kind in BAD]
    assert not bad, "\n".join(bad)
    assert sum(v.kind == RIGHT for v in verdicts) > len(verdicts) / 4 > 0


# -- the scoreboard itself ---------------------------------------------------------------------


def net(seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3))
    return module.double(), (torch.randn(4, 2, 6, 6, dtype=torch.float64),)


def spoiled(spoil: str, comm: Communicator, y: torch.Tensor) -> torch.Tensor:
    """The output of a parallel model with something wrong, on the last rank only."""
    if comm.rank < comm.size - 1:
        return y
    if spoil == "crash":
        raise KeyError("conv")
    if spoil == "sentence":
        raise ShardwiseError("this layer cannot be split")
    if spoil == "wait":
        comm.gather_objects(None)
    if spoil == "draw":
        torch.rand(1)
    changes = {"number": lambda: y + 1e-6, "dtype": y.float, "shape": lambda: y[None]}
    return changes.get(spoil, lambda: y)()


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        ("nothing", RIGHT),
        ("number", WRONG),
        ("dtype", WRONG),
        ("shape", WRONG),
        ("draw", WRONG),
        ("wait", HUNG),
        ("crash", TRACEBACK),
        ("sentence", REFUSED),
    ],
)
def test_what_is_wrong_on_one_rank_is_noticed(
    spoil: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parallel(*args: Any, **options: Any) -> nn.Module:
        model = parallelize(*args, **options)
        model.register_forward_hook(lambda _, x, y: spoiled(spoil, options["comm"], y))
        return model

    monkeypatch.setattr(trial, "parallelize", parallel)
    verdict = attempt(Case("net:0", net), seed=0)
    assert verdict.kind == kind, verdict


def test_what_torch_refuses_must_be_refused_and_what_it_takes_not() -> None:
    def bad() -> Any:
        return nn.Linear(3, 2), (torch.zeros(2, 4),)

    assert attempt(Case("bad:0", bad), 0).kind == NOT_RUNNABLE
    assert attempt(Case("bad:0", bad, must_fail=True), 0).kind == REFUSED
    assert attempt(Case("net:0", net, must_fail=True), 0).kind == NOT_RUNNABLE


def test_a_case_that_ends_its_process_or_never_ends_is_told_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def abort(seed: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    checks = [lambda seed: None, abort, lambda seed: time.sleep(60), lambda seed: "no"]
    made = [Case(f"fake:a:{i}", check=check, seconds=2.0) for i, check in enumerate(checks)]
    fake = SimpleNamespace(cases=lambda group: made)
    monkeypatch.setattr(workers, "source", lambda name: fake)
    found = list(workers.run([workers.Chunk("fake", "a", None, 0)], 1, lambda: True))
    kinds = {verdict.case: verdict.kind for verdict in found}
    assert kinds == {
        "fake:a:0": trial.WHOLE,
        "fake:a:1": TRACEBACK,
        "fake:a:2": SLOW,
        "fake:a:3": WRONG,
    }


def test_the_same_name_gives_the_same_case() -> None:
    for source, group in ((op_db, "nn.functional.conv2d:float32"), (programs, "7")):
        for first, second in zip(source.cases(group)[:5], source.cases(group)[:5], strict=True):
            assert first.build is not None and second.build is not None
            (one, x), (two, y) = first.build(), second.build()
            assert all(map(torch.equal, x, y))
            assert all(map(torch.equal, one.parameters(), two.parameters()))


def test_a_name_of_benchdnn_is_read_as_it_is_meant() -> None:
    conv = convolutions.Conv.parse("g3ic9oc12ih15iw10kh3sh2sw3ph2pw1dh1dw0")
    assert (conv.groups, conv.channels, conv.filters, conv.size) == (3, 9, 12, (15, 10))
    assert (conv.kernel, conv.stride, conv.padding) == ((3, 3), (2, 3), (2, 1))
    assert conv.dilation == (2, 1)
    assert all(c.small().module() is not None for c in convolutions.table().values())
