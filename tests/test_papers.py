"""The papers' figures by simulation: what is cheap of each, and what its data file says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import papers
from published import p2, p3, p4, p5
from published.figures import HERE, Figure, Paper
from published.machines import alone, cluster, network, paced
from shardwise import Plan, simulate
from shardwise.planner.layer_costs import Training

NAMES = ("p2", "p3", "p4", "p5")


@pytest.mark.parametrize("name", NAMES)
def test_a_data_file_has_a_machine_assumptions_and_figures(name: str) -> None:
    paper = Paper.load(name)
    assert paper.machine and paper.assumed
    ids = [figure["id"] for figure in paper.figures]
    assert len(set(ids)) == len(ids) > 5
    assert all(figure["theirs"] > 0 for figure in paper.figures)


@pytest.mark.parametrize("path", sorted((HERE / "clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_cluster_says_what_it_is_made_of(path: Path) -> None:
    assert cluster(path.stem).name == path.stem
    assert "Assumed" in path.read_text()


def test_an_error_is_relative_and_only_small_ones_are_within() -> None:
    close, far = (Figure("x", "", theirs=2.0, ours=ours) for ours in (2.2, 1.5))
    assert (close.error, far.error) == (pytest.approx(0.1), pytest.approx(-0.25))
    assert close.within and not far.within
    assert json.loads(json.dumps(far.as_data()))["within"] is False


def test_a_device_keeps_the_pace_that_was_measured() -> None:
    graph, training = network("alexnet", 8), Training(output="local")
    machines = cluster("k80x16").with_workers(1)
    plan = Plan.uniform(graph, n=1)
    for seconds in (0.1, 0.7):
        pace = paced(graph, plan, machines, training, seconds)
        step = simulate(plan, graph, machines, pace, training).seconds
        assert step == pytest.approx(seconds)
    assert alone(graph, machines, training).seconds > 0


def test_p2s_hybrid_splits_height_first_and_channels_later() -> None:
    graph = network("resnet50", 8)
    case = {"ways": 4, "stationary": "xy"}
    plan = p2.hybrid(graph, 2, case)
    assert str(plan.layers["stem.0.0"]) == "n=2 h=4"
    assert str(plan.layers["stages.3.1.body.1.0"]) == "n=2 c=4"
    assert str(plan.layers["stages.3.1.body.2.0"]) == "n=2 f=4"  # its output is larger
    both = p2.hybrid(graph, 2, {"ways": 8, "stationary": "w"})
    assert str(both.layers["stages.3.1.body.1.0"]) == "n=2 f=2 c=4"


def test_p3s_choices_of_k_and_f_are_ours_too() -> None:
    found = {figure.id: figure for figure in p3.run(quick=True).figures}
    assert found["n256"].within
    for name in ("k-best", "f-best", "f-0", "f-3"):
        assert found[name].error == 0, name


def test_p4s_table_2_is_ours_to_a_hundredth() -> None:
    found = [f for f in p4.run(quick=True).figures if f.id.startswith("t2-")]
    assert len(found) == 6
    assert all(abs(figure.error) < 0.01 for figure in found)


def test_p5s_formulas_are_ours_to_a_hundredth() -> None:
    paper = Paper.load("p5")
    found = paper.compare(p5.formulas(1024)).figures
    assert len(found) == 2
    assert all(abs(figure.error) < 0.01 for figure in found)


def test_p5s_steps_are_a_nodes_own_time_and_one_sum() -> None:
    found = p5.scaling("alexnet_bn", 64, Paper.load("p5"))
    share, speedup = found["share-alexnet_bn-64"] / 100, found["alexnet_bn-64"]
    assert speedup < 1024 * (1 - share) < 1.01 * speedup  # packing is no communication


@pytest.mark.timeout(120)
def test_one_command_prints_every_paper_and_writes_a_file(tmp_path: Path) -> None:
    out = tmp_path / "some" / "papers.json"
    command = [sys.executable, papers.__file__, "--quick", "--json", str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(f"{name.upper()}  " in printed for name in NAMES)
    assert "assumed:" in printed and "figures within 15 %" in printed
    data = json.loads(out.read_text())
    assert data["date"] and {"cpu", "python", "torch", "shardwise"} <= set(data["machine"])
    assert [paper["paper"] for paper in data["figures"]] == list(NAMES)
    for paper in data["figures"]:
        far = [figure for figure in paper["figures"] if not figure["within"]]
        assert all(figure.get("reason") for figure in far), paper["paper"]
