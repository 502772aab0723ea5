"""The tuner: which groups are measured, that all ranks agree, and what a probe keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool import shared_pool
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.measured_sums import Winner
from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.launch.launchers import launched_switches
from shardwise.measure.cluster_file import probe
from shardwise.measure.racing import (
    Figures,
    _best,
    _neighbours,
    measure_figures,
    measure_sums,
    races_of,
)

SIZES = (4096, 1 << 19)


def test_every_kind_of_segment_is_raced_once() -> None:
    races = races_of((0, 0, 0, 0, 1, 1, 1, 1))
    assert races[0] == (tuple(range(8)),)
    assert races[1:3] == [
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    ]
    assert [segments[0] for segments in races[3:]] == [(0, 1), (0, 4)]
    assert races_of((0,) * 3) == [((0, 1, 2),)]


def test_the_backends_own_wins_unless_another_is_clearly_faster() -> None:
    assert _best({"backend": [1.0, 1.0], "ring": [0.99, 0.99]}) == ("backend", 1.0)
    assert _best({"backend": [1.0, 1.0], "ring": [0.5, 0.5]}) == ("ring", 0.5)


def test_neighbours_lie_at_the_own_switch_and_at_the_next() -> None:
    assert _neighbours((0, 0, 0, 1, 1, 1), 3) == ((4, 5), (0, 0))
    assert _neighbours((0, 0, 0), 0) == ((1, 2), (1, 2))


def measured(switches: tuple[int, ...]) -> tuple[tuple[Winner, ...], Figures]:
    comm = Communicator()
    return measure_sums(comm, switches, SIZES, runs=lambda _: 2), measure_figures(comm, switches)


def test_all_ranks_find_the_same_winners() -> None:
    found = shared_pool(4).run(measured, (0, 0, 1, 1))
    assert all(own == found[0] for own in found)
    winners, figures = found[0]
    kinds = [(w.ranks, w.switches, w.bytes) for w in winners]
    assert kinds == [(r, s, n) for r, s in ((4, 2), (2, 1), (2, 2)) for n in SIZES]
    assert figures.latency > 0 and figures.inside > 0 and figures.across > 0


def test_a_probe_of_sums_is_kept_in_the_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    cluster = probe([], workers=2, sums=True)
    assert cluster is not None and {(w.ranks, w.switches) for w in cluster.sums} == {(2, 1)}
    cluster.save(tmp_path / "here.yaml")
    assert Cluster.load(tmp_path / "here.yaml").sums == cluster.sums


def test_switches_are_those_of_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_PER_SWITCH", raising=False)
    assert launched_switches(3) == (0, 0, 0)
    monkeypatch.setenv("SHARDWISE_PER_SWITCH", "2")
    assert launched_switches(5) == (0, 0, 1, 1, 2)


def other_tables() -> str:
    comm = Communicator()
    row = {"ranks": 2, "switches": 1, "bytes": 8, "algorithm": "ring", "seconds": comm.rank}
    cluster = Cluster.load("2x1Gb").model_copy(update={"sums": (Winner.model_validate(row),)})
    try:
        comm.summing_as(cluster)
    except ShardwiseError as error:
        return str(error)
    return ""


def test_ranks_with_different_tables_are_refused() -> None:
    for said in shared_pool(2).run(other_tables):
        assert "different measurements" in said
