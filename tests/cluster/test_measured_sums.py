"""The winner table: read from cluster files, checked, and asked by size."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.measured_sums import Algorithm, Winner, fastest
from shardwise.cluster.schedules import ALGORITHMS
from shardwise.comm import SumRules
from shardwise.errors import ShardwiseError


def winner(nbytes: int, algorithm: str, ranks: int = 8, switches: int = 2) -> Winner:
    return Winner.model_validate(
        {
            "ranks": ranks,
            "switches": switches,
            "bytes": nbytes,
            "algorithm": algorithm,
            "seconds": 1,
        }
    )


TABLE = (winner(4096, "direct"), winner(1 << 20, "two-level"), winner(1 << 20, "ring", 4, 1))


def test_every_schedule_may_win() -> None:
    assert set(get_args(Algorithm)) == {"backend", "direct", *ALGORITHMS}


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(1, "direct"), (60_000, "direct"), (70_000, "two-level"), (1 << 30, "two-level")],
)
def test_the_nearest_size_in_ratio_counts(nbytes: int, expected: str) -> None:
    assert fastest(TABLE, 8, 2, nbytes) == expected


def test_groups_that_were_not_measured_have_no_winner() -> None:
    assert fastest(TABLE, 4, 2, 4096) is None
    assert fastest(TABLE, 4, 1, 4096) == "ring"


def test_a_segment_is_looked_up_by_its_ranks_and_switches() -> None:
    sums = SumRules((0, 0, 0, 0, 1, 1, 1, 1), TABLE)
    assert sums.of((0, 2, 4, 6)) == ((0, 2), (4, 6))
    assert sums.algorithm((4, 5, 6, 7), 1 << 20) == "ring"
    assert sums.algorithm((0, 2, 4, 6), 1 << 20) is None


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_the_cluster_file_keeps_the_winners(tmp_path: Path, suffix: str) -> None:
    cluster = Cluster.load("2x4@1Gb/4:1").model_copy(update={"sums": TABLE})
    path = tmp_path / f"here.{suffix}"
    cluster.save(path)
    again = Cluster.load(path)
    assert again == cluster and again.with_workers(4).sums == TABLE
    assert again.switches == (0, 0, 0, 0, 1, 1, 1, 1)
    assert Cluster.load("4x1Gb").switches == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[{ranks: 8, switches: 2, bytes: 1, algorithm: tree, seconds: 1}]", "algorithm"),
        ("[{ranks: 2, switches: 3, bytes: 1, algorithm: ring, seconds: 1}]", "3 switches"),
        ("[{ranks: 1, switches: 1, bytes: 1, algorithm: ring, seconds: 1}]", "ranks"),
        ("[{ranks: 2, switches: 1, bytes: 0, algorithm: ring, seconds: 1}]", "bytes"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, rows: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(Cluster.load("4x1Gb").to_yaml() + f"sums: {rows}\n")
    with pytest.raises(ShardwiseError, match=rf"wrong\.yaml.*{message}"):
        Cluster.load(path)


def test_a_race_has_one_winner(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    cluster = Cluster.load("4x1Gb").model_copy(update={"sums": (TABLE[0], TABLE[0])})
    cluster.save(path)
    with pytest.raises(ShardwiseError, match=r"sums\.1 is the second for 8 ranks"):
        Cluster.load(path)
