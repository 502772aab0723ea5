"""Whatever happens to one rank, and wherever: all end in time with a sentence; nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from convolutions import SEED
from faults.matrix import prepare, try_cell
from faults.table import FAULTS, PLACES, SENSELESS, Cell, cells

SAMPLE = 6


def _sample() -> list[Cell]:
    """Other cells in every run; one that takes the whole timeout at most."""
    every = cells(SEED)
    random.Random(SEED).shuffle(every)
    quick = [cell for cell in every if cell.fault not in ("stop", "slow")]
    return [next(cell for cell in every if cell.fault in ("stop", "slow")), *quick[: SAMPLE - 1]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("faults") / "run"
    prepare(run)
    return run


@pytest.mark.parametrize("cell", _sample(), ids=lambda cell: f"{SEED}")
def test_a_sample_of_the_matrix_ends_well(cell: Cell, prepared: Path, tmp_path: Path) -> None:
    outcome = try_cell(cell, prepared, tmp_path)
    assert not outcome.wrong, f"{cell} with SHARDWISE_TEST_SEED={SEED}: {outcome.wrong}"


@pytest.mark.deep
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_cell_of_the_matrix_ends_well(cell: Cell, prepared: Path, tmp_path: Path) -> None:
    assert not try_cell(cell, prepared, tmp_path).wrong


def test_every_cell_makes_sense_or_says_why_not() -> None:
    known = {(cell.fault, cell.place) for cell in cells()}
    assert known | SENSELESS.keys() == {(fault, place) for fault in FAULTS for place in PLACES}
    assert not known & SENSELESS.keys()
