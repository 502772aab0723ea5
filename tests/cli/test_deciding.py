"""`shardwise plan` and `shardwise simulate`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import Config, Plan, capture
from shardwise.cluster.cluster import Cluster

Run = tuple[int, str, str]

NET = """
from torch import nn

def build(width=8):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 10)
    )
"""
SHAPE = (8, 3, 6, 6)
INPUT = "8x3x6x6"
RIVALS = ("sample (DDP)", "OWT", "spatial", "uniform x (c)", "uniform y (f)", "uniform w (c x f)")


@pytest.fixture
def net(tmp_path: Path) -> str:
    """A model file, quicker to capture than any of the zoo."""
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:build"


def saved_plan(path: Path, world: int = 4, width: int = 8, **degrees: int) -> str:
    """The file of a uniform plan for the model above."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 10)
    )
    Plan.uniform(capture(model, torch.zeros(SHAPE)), world, **degrees).save(path)
    return str(path)


# -- plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan", "--cluster --workers --batch --input --memory --gradients --output --explain "
         "--save --json --num-classes --option"),
        ("simulate", "--cluster --workers --batch --input --plan --split --gradients --trace "
         "--json --num-classes --option"),
    ],
)  # fmt: skip
def test_help_names_every_option(run, command: str, words: str) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(command, "--help")
    assert code == 0
    assert all(word in out for word in words.split())


def test_plan_prints_every_layer_and_the_rivals(run, net: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("plan", net, "--cluster", "4x10Gb", "--input", INPUT)
    assert code == 0, err
    assert "plan for 4 workers" in out and "compared with" in out
    for words in ("layer", "operator", "split", "compute ms", "transfer ms", "update ms", "memory"):
        assert words in out
    for row in ("│ 0 ", "│ 1 ", "│ 2 ", "│ 3 ", "│ output of 3 ", "│ this plan "):
        assert row in out
    assert all(f"│ {rival} " in out for rival in RIVALS)
    assert "step " in out and "overlap " in out
    assert max(map(len, out.splitlines())) <= 160  # no terminal: as wide as its tables need


def test_plan_names_a_network_of_the_zoo_and_its_default_batch(run) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("plan", "digits", "--workers", "2", "--option", "width=4", "--json")
    assert code == 0, err
    assert json.loads(out)["workers"] == 2


def test_explain_shows_the_alternatives_of_a_layer(run, net: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(
        "plan", net, "--cluster", "4x10Gb", "--input", INPUT, "--explain", "3", "--explain", "0"
    )
    assert code == 0, err
    assert "alternatives for 3" in out and "alternatives for 0" in out
    assert "compared with" not in out
    for words in ("split", "workers", "transfer ms", "compute ms", "update ms", "onward ms"):
        assert words in out
    tables = out.split("alternatives for")[1:]
    for table in tables:
        assert table.count("chosen") == 1
        for split in ("n=4", "f=4", "whole"):  # the pure splits are always shown
            assert f"│ {split} " in table


def test_plan_says_how_far_it_is_from_the_least_and_how_long_it_took(run, net: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("plan", net, "--cluster", "4x10Gb", "--input", INPUT)
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("proven: no plan of the ")]
    assert "splits tried for 4 layers" in line and line.endswith(" s")


def test_why_not_pin_and_diff_answer_and_agree(run, net: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    where, path = ("--cluster", "4x10Gb", "--input", INPUT), str(tmp_path / "pinned.json")
    code, out, err = run("plan", net, *where, "--pin", "3=f=4", "--save", path)
    assert code == 0, err
    assert "(1 of them pinned)" in out and Plan.load(path).layers["3"] == Config(f=4)
    asked = ("--why-not", "3=f=4", "--why-not", "3=h=2", "--diff", path)
    code, out, err = run("plan", net, *where, *asked)
    assert code == 0, err
    assert "f=4 of 3 instead of " in out and "legal:" in out and "what is more" in out
    assert "compared with" not in out
    code, out, err = run("plan", net, *where, *asked, "--json")
    assert code == 0, err
    data = json.loads(out)
    forced, illegal = data["why_not"]
    assert forced["possible"] and not illegal["possible"] and illegal["difference"] is None
    after = data["diff"]["after"], forced["difference"]["after"]
    assert after[0]["step"] <= after[1]["step"] * (1 + 1e-9)  # pins are solved in several ways


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--pin", "33=f=4", "no layer '33' to pin; did you mean '3'?"),
        ("--pin", "3=h=2", "cannot be split over height"),
        ("--pin", "3", "is not a layer and its split"),
        ("--why-not", "33=f=4", "no layer '33' to ask about"),
        ("--why-not", "3=q=4", "'q' is not an axis"),
        ("--diff", "nowhere.json", "'nowhere.json' cannot be read"),
    ],
)
def test_a_question_that_has_no_answer_is_one_sentence(  # type: ignore[no-untyped-def]
    run, net: str, option: str, text: str, message: str
) -> None:
    code, _, err = run("plan", net, "--cluster", "4x10Gb", "--input", INPUT, option, text)
    assert code != 0 and message in err.replace("\n", " ")


def test_json_holds_the_plan_and_its_rivals(run, net: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("plan", net, "--cluster", "4x10Gb", "--input", INPUT, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert set(data) == {
        "workers", "cluster", "training", "inputs",
        "step_seconds", "cost_seconds", "compute_seconds",
        "transfer_seconds", "update_seconds", "moved_bytes", "memory_bytes", "layers", "rivals",
            "alternatives", "bound_seconds", "gap", "search_seconds", "optimality", "why_not",
    }  # fmt: skip
    assert data["workers"] == 4 and data["cluster"] == "4x10Gb"
    assert [row["layer"] for row in data["layers"]] == ["0", "1", "2", "3", "output of 3"]
    for row in data["layers"]:
        assert set(row) == {
            "layer", "op", "split", "workers", "compute_seconds", "transfer_seconds",
            "update_seconds", "moved_bytes", "memory_bytes",
        }  # fmt: skip
    parts = ("compute_seconds", "transfer_seconds", "update_seconds")
    for part in parts:
        assert sum(row[part] for row in data["layers"]) == pytest.approx(data[part])
    assert sum(data[part] for part in parts) == pytest.approx(data["cost_seconds"])
    assert sum(row["moved_bytes"] for row in data["layers"]) == data["moved_bytes"]
    assert set(RIVALS) <= set(data["rivals"])
    for rival in data["rivals"].values():
        totals = {key for key in data if key.endswith("_seconds")}
        totals -= {"bound_seconds", "search_seconds"}
        assert set(rival) == {*totals, "split", "moved_bytes", "memory_bytes"}
        assert rival["step_seconds"] >= data["step_seconds"] * (1 - 1e-9)


def test_save_writes_a_plan_that_loads_and_simulates(run, net: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    where = ("--cluster", "4x10Gb", "--input", INPUT)
    code, out, err = run("plan", net, *where, "--save", str(path), "--json")
    assert code == 0, err
    plan = Plan.load(path)
    assert plan.world == 4 and plan.inputs == (SHAPE,)
    splits = {row["layer"]: row["split"] for row in json.loads(out)["layers"]}
    assert all(str(plan.layers[name]) == splits[name] for name in ("0", "1", "2", "3"))
    code, step, err = run("simulate", net, *where, "--plan", str(path), "--json")
    assert code == 0, err
    assert json.loads(step)["step_seconds"] == pytest.approx(json.loads(out)["step_seconds"])


def test_plan_keeps_a_cap_on_memory(run, net: str) -> None:  # type: ignore[no-untyped-def]
    where = ("--cluster", "4x10Gb", "--input", INPUT, "--option", "width=512", "--json")
    free = json.loads(run("plan", net, *where)[1])["memory_bytes"]
    code, out, err = run("plan", net, *where, "--memory", str(free))
    assert code == 0, err
    assert json.loads(out)["memory_bytes"] <= free


def test_plan_reads_a_cluster_file_and_a_local_output_is_cheaper(  # type: ignore[no-untyped-def]
    run, net: str, tmp_path: Path
) -> None:
    Cluster.load("4x10Gb").save(tmp_path / "machines.yaml")
    arguments = ("plan", net, "--cluster", str(tmp_path / "machines.yaml"), "--input", INPUT)
    full = json.loads(run(*arguments, "--json")[1])
    local = json.loads(run(*arguments, "--output", "local", "--json")[1])
    assert local["cost_seconds"] < full["cost_seconds"]
    assert local["layers"][-1]["transfer_seconds"] == 0.0


# -- simulate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [["--split", "n=2,h=2"], ["--plan", "owt"], []])
def test_simulate_prints_three_lines(run, net: str, more: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("simulate", net, "--cluster", "4x10Gb", "--input", INPUT, *more)
    assert code == 0, err
    step, computing, communication = out.splitlines()
    assert step.startswith("step ") and step.endswith(" ms on 4 workers")
    assert computing.startswith("computing ") and "waiting " in computing
    assert communication.startswith("communication ") and "overlap " in communication


def test_simulate_as_json_adds_up_on_every_rank(run, net: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(
        "simulate", net, "--cluster", "4x10Gb", "--input", INPUT, "--split", "h=4", "--json"
    )
    assert code == 0, err
    data = json.loads(out)
    assert set(data) == {
        "workers", "step_seconds", "busy_seconds", "waiting_seconds", "communication_seconds",
        "exposed_seconds", "overlap",
    }  # fmt: skip
    assert data["workers"] == 4
    for busy, waiting in zip(data["busy_seconds"], data["waiting_seconds"], strict=True):
        assert busy + waiting == pytest.approx(data["step_seconds"])


def test_simulate_reads_a_plan_file(run, net: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    where = (net, "--cluster", "4x10Gb", "--input", INPUT, "--json")
    path = saved_plan(tmp_path / "plan.json", n=2, h=2)
    code, from_file, err = run("simulate", *where, "--plan", path)
    assert code == 0, err
    assert from_file == run("simulate", *where, "--split", "n=2,h=2")[1]


def test_gradients_that_leave_early_are_hidden(run, net: str) -> None:  # type: ignore[no-untyped-def]
    where = (net, "--cluster", "4x10Gb", "--input", INPUT, "--split", "n=4", "--json")
    overlap = {}
    for gradients in ("end", "layer", "chunks:1", "chunks:2", "buckets:1KiB", "buckets:1GiB"):
        code, out, err = run("simulate", *where, "--gradients", gradients)
        assert code == 0, err
        overlap[gradients] = json.loads(out)["overlap"]
    assert overlap["layer"] == overlap["chunks:1"] == overlap["buckets:1KiB"] > 0
    assert overlap["end"] == overlap["chunks:2"] == overlap["buckets:1GiB"]
    assert overlap["end"] < overlap["layer"]


def test_a_trace_is_written_for_its_viewer(run, net: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "step.json"
    where = (net, "--cluster", "4x10Gb", "--input", INPUT)
    code, out, err = run("simulate", *where, "--split", "n=4", "--trace", str(path))
    assert code == 0, err
    assert out.startswith("step ")
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert {"0", "3"} <= {event["name"] for event in events if event["ph"] == "X"}


def test_simulate_has_two_local_workers_unless_told_otherwise(run, net: str) -> None:  # type: ignore[no-untyped-def]
    where = (net, "--input", INPUT, "--json")
    assert json.loads(run("simulate", *where)[1])["workers"] == 2
    assert json.loads(run("simulate", *where, "--workers", "1")[1])["workers"] == 1


# -- what is refused -------------------------------------------------------------------------------


BAD = """
name: mine
device: {flops: 1Tflop/s, memory_bandwidth: 1GB/s, memory: 1GiB}
links:
  - {name: switch, count: 4, bandwidth: 10Gb}
"""


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--cluster nowhere", "'nowhere' is not a cluster; give a preset"),
        ("--cluster none.yaml", "cluster file 'none.yaml' does not exist"),
        ("--cluster {tmp}/bad.yaml", "links.0.latency: Field required"),
        ("--workers 0", "workers: Input should be greater than or equal to 1"),
        ("--workers 9 --cluster 4x10Gb", "9 workers are more than its levels hold: 4"),
        (
            "--gradients soon",
            "gradients 'soon' must be end, layer, chunks:K, chunks:auto or buckets:SIZE",
        ),
        ("--gradients chunks", "gradients 'chunks' must be"),
        ("--gradients chunks:0", "gradients 'chunks:0' must be"),
        ("--gradients chunks:²", "gradients 'chunks:²' must be"),
        ("--gradients buckets", "gradients 'buckets' must be"),
        ("--gradients buckets:big", "'big' is not a size in bytes such as 12GiB"),
        ("--batch 0", "batch 0: there must be at least 1 sample"),
        ("--batch 4", "--batch 4 does not agree with the input of 8 samples"),
        ("--option depth=3", "failed with TypeError"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(  # type: ignore[no-untyped-def]
    run, net: str, tmp_path: Path, command: str, arguments: str, sentence: str
) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    given = arguments.format(tmp=tmp_path).split()
    assert_refused(run(command, net, "--input", INPUT, *given), sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("plan {net} --output nonsense", "output 'nonsense' must be one of full, local, one"),
        ("plan {net} --memory 1MiB --cluster 4x10Gb --option width=4096", "the model does not fit"),
        ("plan {net} --memory big", "'big' is not a size in bytes such as 12GiB or 16GB"),
        ("plan {net} --explain 33", "the model has no layer '33' to explain; did you mean '3'?"),
        ("plan {net} --save {tmp}/nowhere/plan.json", "plan.json"),
        ("simulate {net} --trace {tmp}/nowhere/step.json", "step.json"),
        ("simulate {net} --plan none.json", "the plan file 'none.json' cannot be read"),
        ("simulate {net} --plan {tmp}/net.py", "Invalid JSON"),
        ("simulate {net} --split q=2", "split 'q=2': 'q' is not an axis"),
        ("simulate {net} --split n=4 --workers 2", "split n=4 needs 4 workers, and there are 2"),
    ],
)
def test_other_mistakes_are_one_line_and_exit_code_2_too(  # type: ignore[no-untyped-def]
    run, net: str, tmp_path: Path, arguments: str, sentence: str
) -> None:
    given = arguments.format(tmp=tmp_path, net=net).split()
    assert_refused(run(*given, "--input", INPUT), sentence)


def assert_refused(result: Run, sentence: str) -> None:
    code, out, err = result
    assert code == 2
    assert not out
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_more_workers_than_any_layer_can_use_are_refused(run) -> None:  # type: ignore[no-untyped-def]
    spec = ("torch.nn:Linear", "--option", "in_features=2", "--option", "out_features=2")
    where = ("--input", "2x2", "--workers", "64")
    for command in ("plan", "simulate"):
        sentence = "no layer of this model can be split over 64 workers; the most that a layer can"
        assert_refused(run(command, *spec, *where), sentence)


def test_a_model_that_does_not_fit_is_told_what_it_needs(run) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("plan", "digits", "--memory", "1MiB", "--cluster", "4x10Gb")
    assert code == 2 and not out
    assert err.startswith("error: the model does not fit: a worker may use 1 MiB, and the least")
    assert "for 4 workers needs is " in err and err.count("\n") == 1


def test_a_plan_for_another_world_or_model_is_refused(run, net: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    where = ("simulate", net, "--cluster", "4x10Gb", "--input", INPUT, "--plan")
    two = saved_plan(tmp_path / "two.json", world=2, n=2)
    assert_refused(run(*where, two), "two.json is for 2 workers, and there are 4")
    wide = saved_plan(tmp_path / "wide.json", width=9, n=4)
    assert_refused(run(*where, wide), "the plan was made for another model (network")


def test_plans_for_inference_have_several_sizes(run, net: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "plan.json"
    sizes = ("--size", "1x3x6x6", "--size", "2x3x6x6")
    options = ("--cluster", "2x10Gb", "--inference", "--output", "one", *sizes, "--input", INPUT)
    code, out, err = run("plan", net, *options, "--save", str(file), "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["training"] is False and len(data["sizes"]) == 2
    assert data["update_seconds"] == 0 and "one worker" in data["rivals"]
    code, out, err = run("plan", net, *options)
    assert code == 0 and "every size" in out and "rank 0" in out
    assert not Plan.load(file).training and len(Plan.load(file).others) == 2
    code, out, err = run("verify", net, "--inference", "--plan", str(file))
    assert code == 0, err
    for size in (INPUT, "1x3x6x6", "2x3x6x6"):
        assert f"input {size}" in out
    given = ("--plan", str(file), "--input", "1x3x6x6", "--json")
    code, out, err = run("simulate", net, "--inference", "--cluster", "2x10Gb", *given)
    assert code == 0 and json.loads(out)["workers"] == 2, err
