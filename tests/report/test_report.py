"""Reports: their data, the page, and what is said about a run that cannot be reported on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from report.pages import examined_plan, recorded, run_folder
from shardwise import Plan
from shardwise.cli.app import main
from shardwise.errors import ShardwiseError
from shardwise.geometry.grid import Config
from shardwise.plans.trace import Span, Trace
from shardwise.report import contents, render, write_page, write_report
from shardwise.report.page import split_kind
from shardwise.report.trace_data import RANKS, TICKS, per_layer, timeline


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def plan(home: Path) -> Plan:
    return examined_plan(home)


@pytest.fixture
def run(home: Path) -> Path:
    return run_folder(home)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Config(n=4), "n"),
        (Config(h=2), "spatial"),
        (Config(d=2, h=2, w=2), "spatial"),
        (Config(f=2), "f"),
        (Config(c=2), "c"),
        (Config(n=2, h=2), "mixed"),
        (Config(f=2, c=2), "mixed"),
        (Config(), "whole"),
    ],
)
def test_a_split_has_one_kind(config: Config, kind: str) -> None:
    assert split_kind(config) == kind


def test_layers_carry_their_costs_and_alternatives(plan: Plan) -> None:
    data = contents(plan, "net")["plan"]
    layers = {layer["name"]: layer for layer in data["layers"]}
    row = next(row for row in plan.findings.prediction.rows if row.layer == "left")
    assert layers["left"]["kind"] == "spatial"
    assert layers["left"]["compute_seconds"] == pytest.approx(row.compute, rel=1e-3)
    assert layers["left"]["moved_bytes"] == row.moved
    assert layers["head.3"]["workers"] == 2
    assert not layers["x"]["alternatives"]
    chosen = [row[0] for row in layers["left"]["alternatives"] if row[-1]]
    assert chosen == ["h=2 w=2"]
    totals = [sum(row[1:5]) for row in layers["left"]["alternatives"]]
    assert totals == sorted(totals)


def test_edges_say_what_moves(plan: Plan) -> None:
    drawing = contents(plan, "net")["plan"]["drawing"]
    names = [layer.name for layer in plan.findings.costs.graph.layers]
    first = [names[members[0]] for _, _, members in drawing["blocks"]]
    moved = {tuple(first[end] for end in edge["ends"]): edge["bytes"] for edge in drawing["edges"]}
    assert moved["x", "stem.0"] == 0
    assert moved["stem.0", "left"] > 0
    assert moved["stem.0", "cat"] == 0


def test_memory_is_known_for_each_rank(plan: Plan) -> None:
    held = contents(plan, "net")["memory"]["predicted"]
    assert len(held) == 4 and max(held) == plan.findings.prediction.memory


def test_bars_compare_the_same_sums_of_both_traces(plan: Plan) -> None:
    trace = plan.findings.trace
    data = contents(plan, "net", recorded(trace))["bars"]
    predicted, measured = data["seconds"]["simulated"], data["seconds"]["recorded"]
    assert np.array(measured) == pytest.approx(1.25 * np.array(predicted), rel=2e-3, abs=1e-9)
    assert {"stem.0", "left", "optimizer", "sums of gradients"} <= set(data["layers"])
    assert np.sum(predicted) == pytest.approx(
        sum(seconds.mean() for seconds in trace.kinds.values()), rel=1e-2
    )


def test_activities_belong_to_the_layer_in_their_name() -> None:
    zero, one = np.zeros(2), np.ones(2)
    names = ("a.1", "a.1>0", "a.1 statistics", "a.1 to all", "a.1 gradient", "a.1~ unpacked")
    spans = [Span(name, "transfer", "transfers", zero, one, one) for name in names]
    assert per_layer(Trace(2, spans), ["a.1", "a.10"]) == {"a.1": [0.0, 0.0, 0.0, 6.0]}


def test_a_timeline_shows_the_first_ranks_in_whole_ticks() -> None:
    starts, ends = np.arange(20.0), np.arange(20.0) + 1
    same = Span("b", "backward", "compute", np.full(20, 20.0), np.full(20, 25.0))
    trace = Trace(20, [Span("a", "forward", "compute", starts, ends), same])
    data = timeline(trace, "simulated")
    assert (data["shown"], data["world"]) == (RANKS, 20)
    first, second = data["spans"]
    assert first[3] == [round(rank * TICKS / 25) for rank in range(RANKS)]
    assert first[4] == TICKS // 25
    assert second[3:] == [20 * TICKS // 25, TICKS // 5]


def test_a_trace_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    trace = plan.findings.trace
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert again.world == trace.world
    assert again.seconds == pytest.approx(trace.seconds)
    assert again.busy == pytest.approx(trace.busy)
    assert again.exposed == pytest.approx(trace.exposed)
    assert again.overlap == pytest.approx(trace.overlap)


# -- the page --------------------------------------------------------------------------------------


def test_a_page_loads_nothing(plan: Plan) -> None:
    page = render(contents(plan, "net", recorded(plan.findings.trace), [{"loss": 1.0}]))
    code = page.replace(json.dumps(data_of(page)), "")
    assert "://" not in code
    assert not re.search(r"\b(src|href)\s*=\s*[\"'](?!#)", code)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|<link", code)


def test_names_are_text_and_never_markup(plan: Plan) -> None:
    title = "</script><script>alert(1)</script> {{DATA}}"
    page = render(contents(plan, title, settings={"<b>": "</script>"}))
    assert "<script>alert" not in page
    assert data_of(page)["title"] == title
    assert data_of(page)["settings"] == [["<b>", "</script>"]]


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match=r"the report '.*/page.html' cannot be written"):
        write_page(tmp_path / "no" / "page.html", contents(None, "nothing"))


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_becomes_one_page(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    assert path.stat().st_size < 300_000
    data = data_of(path.read_text())
    assert [step["label"] for step in data["steps"]] == ["simulated", "recorded"]
    assert [chart["title"] for chart in data["charts"]] == [
        "loss",
        "accuracy",
        "samples_per_second",
    ]
    assert data["memory"]["measured"] == [200_000, 201_000, 202_000, 203_000]
    assert ["epochs", "3"] in data["settings"]
    assert data["plan"]["workers"] == 4


def test_a_plan_that_was_examined_is_not_examined_again(run: Path, plan: Plan) -> None:
    (run / "plan.json").unlink()
    (run / "config.json").write_text("{}")
    data = data_of(write_report(run, plan=plan).read_text())
    assert data["title"] == "run on 4 workers" and data["plan"] is not None


def test_a_run_without_a_model_trace_or_metrics_still_has_a_page(run: Path) -> None:
    (run / "config.json").write_text('{"epochs": 2}')
    (run / "metrics.jsonl").unlink()
    (run / "trace.json").unlink()
    data = data_of(write_report(run).read_text())
    assert data["plan"] is None and data["steps"] == [] and data["charts"] == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.json", None, "the plan file '.*plan.json' cannot be read"),
        ("plan.json", "{}", "plan file '.*plan.json': format: Field required"),
        ("config.json", None, "the run's settings '.*config.json' cannot be read"),
        ("config.json", "{", "config.json' is not JSON"),
        ("config.json", "[" * 100_000, "config.json' is not JSON"),
        ("config.json", "[]", "config.json' must hold one JSON object"),
        ("config.json", '{"model": 3}', "config.json': model: Input should be a valid string"),
        ("config.json", '{"model": "resnet5o"}', "the plan of '.*run': .*resnet5o"),
        ("config.json", '{"model": "digits"}', "the plan of '.*run': .*"),
        ("metrics.jsonl", "loss\n", "metrics.jsonl, line 1 is not JSON: 'loss'"),
        ("metrics.jsonl", b"\xff\xfe", "the metrics file '.*' cannot be read"),
        ("trace.json", "{}", "trace file '.*trace.json': traceEvents: Field required"),
        ("trace.json", "not", "trace file '.*trace.json': the file: Invalid JSON"),
        ("trace.json", '{"traceEvents": []}', "traceEvents: List should have at least 1 item"),
        (
            "trace.json",
            '{"traceEvents": [{"ph": "X", "name": "a", "cat": "forward", "pid": 0, "tid": 0, '
            '"ts": -1, "dur": 2}]}',
            "traceEvents.0.X.ts: Input should be greater than or equal to 0",
        ),
        ("trace.json", '{"traceEvents": [{"ph": "M", "pid": 99999999}]}', "pid: Input should be"),
    ],
)
def test_a_file_that_is_missing_or_broken_is_named(
    run: Path, name: str, text: str | bytes | None, message: str
) -> None:
    if text is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ShardwiseError, match=message) as caught:
        write_report(run)
    assert "\n" not in str(caught.value)


def test_odd_settings_are_shown_as_they_are(run: Path) -> None:
    deep = '{"a":' * 500 + "1" + "}" * 500
    config = f'{{"deep": {deep}, "odd": "\\ud800 <b>", "list": [1, {{"b": null}}], "nan": NaN}}'
    (run / "config.json").write_text(config)
    settings = dict(data_of(write_report(run).read_text())["settings"])
    assert settings["list"] == '[1, {"b": null}]' and settings["odd"].endswith("<b>")


# -- the command line ------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_plan_and_simulate_write_pages(home: Path, plan: Plan, tmp_path: Path) -> None:
    model = (f"{home / 'net.py'}:Net", "--input", "8x3x8x8", "--cluster", "4x10Gb")
    assert command("plan", *model, "--html", str(tmp_path / "plan.html")) == 0
    assert command("simulate", *model, "--split", "h=2", "--html", str(tmp_path / "s.html")) == 0
    data = data_of((tmp_path / "plan.html").read_text())
    assert data["title"] == "net.py:Net on 4 workers" and data["plan"]["rivals"]
    simulated = data_of((tmp_path / "s.html").read_text())
    kinds = {layer["name"]: layer["split"] for layer in simulated["plan"]["layers"]}
    assert kinds["left"] == "h=2"
    assert len(simulated["steps"]) == 1


def test_a_page_says_how_good_a_plan_is_and_answers_why_not(
    home: Path, plan: Plan, tmp_path: Path
) -> None:
    model = (f"{home / 'net.py'}:Net", "--input", "8x3x8x8", "--cluster", "4x10Gb")
    asked = ("--why-not", "left=h=2", "--why-not", "left=n=4,h=2")
    assert command("plan", *model, *asked, "--html", str(tmp_path / "plan.html")) == 0
    data = data_of((tmp_path / "plan.html").read_text())
    assert data["plan"]["optimality"].startswith("proven: no plan of the ")
    (forced, table), (refused, nothing) = data["answers"]
    assert forced.startswith("h=2") and "all" in table
    assert "needs 8 workers" in refused and nothing == ""


def test_report_says_where_the_page_is(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert command("report", str(run), "--out", str(out)) == 0
    assert f"written to {out}" in capfd.readouterr().out.replace("\n", "")
    assert command("report", str(tmp_path / "nothing")) == 2
    assert "is not the folder of a run" in capfd.readouterr().err
