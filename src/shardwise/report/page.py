"""All that a report shows, as plain data, and the one HTML file around it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.files import write_whole
from shardwise.geometry.grid import Config
from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.planner.costs import value_operands
from shardwise.planner.planned import SIMULATED, Findings
from shardwise.planner.shown_plan import as_data, notable_alternatives
from shardwise.planner.why_not import WhyNot
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.report.drawing import HEIGHT, WIDTH, Drawing, draw
from shardwise.report.history import History, compared, measured_memory, memory_over_time
from shardwise.report.trace_data import PARTS, per_layer, short, shortened, timeline
from shardwise.version import __version__

ALTERNATIVES = 8  # the best ones that are shown of each layer, beside the pure and the chosen
SCRIPTS = ("base.js", "plan.js", "bars.js", "timeline.js", "charts.js", "page.js")


def contents(
    plan: Plan | None,
    title: str,
    measured: Trace | None = None,
    history: History = (),
    settings: Mapping[str, Any] | None = None,
    answers: Sequence[WhyNot] = (),
    others: Mapping[str, OtherRun] | None = None,
) -> dict[str, Any]:
    """What the page shows; a plan must have been examined, a part that is not known is left out.

    The curves of other runs are drawn beside this one's, and settings that differ are named.
    """
    findings: Findings | None = plan.findings if plan is not None else None
    traces: dict[str, Trace] = {}
    if findings is not None:
        traces["simulated"] = findings.trace
    if measured is not None:
        traces["recorded"] = measured
    world = plan.world if plan is not None else None
    return {
        "title": title,
        "version": __version__,
        "settings": [[key, _text(value)] for key, value in (settings or {}).items()],
        "plan": None if plan is None or findings is None else plan_data(plan, findings),
        "answers": [[answer.sentence, str(answer.difference or "")] for answer in answers],
        "bars": bars(findings, traces),
        "steps": [timeline(trace, label, world) for label, trace in traces.items()],
        "memory": {
            "predicted": list(findings.prediction.held) if findings is not None else [],
            "measured": measured_memory(history),
            "over_time": memory_over_time(history),
        },
        "runs": [title, *(others or {})],
        "charts": compared({title: history} | {n: o.history for n, o in (others or {}).items()}),
        "differing": _differing(settings or {}, others or {}),
    }


@dataclass(frozen=True)
class OtherRun:
    """A run that is compared with the one of the page."""

    settings: Mapping[str, Any]
    history: History


def _differing(settings: Mapping[str, Any], others: Mapping[str, OtherRun]) -> str:
    """What the other runs set otherwise, in a sentence each."""
    sentences = []
    for name, other in others.items():
        keys = [
            k for k in {**settings, **other.settings} if settings.get(k) != other.settings.get(k)
        ]
        told = "; ".join(
            f"{key} {_text(other.settings.get(key))} instead of {_text(settings.get(key))}"
            for key in keys
        )
        sentences.append(f"{name}: {told or 'the same settings'}.")
    return " ".join(sentences)


def title_of(model: str, plan: Plan) -> str:
    """The heading of a page; of a model in a file, the folders are left out."""
    return f"{model.rpartition('/')[2]} on {plan.world} workers"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def split_kind(config: Config) -> str:
    """What is split, in one word; the page has one colour for each.

    >>> split_kind(Config(h=2, w=2))
    'spatial'
    """
    axes = {axis for axis in "ndhwfc" if getattr(config, axis) > 1}
    if not axes:
        return "whole"
    if axes <= {"d", "h", "w"}:
        return "spatial"
    return axes.pop() if len(axes) == 1 else "mixed"


# -- the plan --------------------------------------------------------------------------------------


def plan_data(plan: Plan, findings: Findings) -> dict[str, Any]:
    """The plan as `as_data` has it, but for layers, of which the page shows more, and a drawing."""
    data, graph = as_data(plan), findings.costs.graph
    rows = {row["layer"]: row for row in data["layers"]}
    layers = [_layer(layer, plan, findings, rows.get(layer.name, {})) for layer in graph.layers]
    return shortened(data) | {
        "batch": graph.batch,
        "overlap": short(findings.trace.overlap),
        "layers": layers,
        "drawing": _drawing(draw(graph, plan), plan, findings),
    }


def _layer(layer: Layer, plan: Plan, findings: Findings, row: Mapping[str, Any]) -> dict[str, Any]:
    """A layer and its costs, which inputs have none of."""
    config = plan.config(layer, findings.costs.graph)
    return shortened(row) | {
        "name": layer.name,
        "op": layer.traits.called or layer.op,
        "shape": list(layer.shape),
        "split": str(config),
        "kind": split_kind(config),
        "workers": config.num_workers,
        "whole": layer.name in plan.whole,
        "alternatives": _alternatives(layer, findings) if row else [],
    }


def _alternatives(layer: Layer, findings: Findings) -> list[list[Any]]:
    """P4's Tables 2 and 3 for one layer; of huge clusters nothing, where each costs seconds.

    Each is a list, since a page has thousands: split, four times, whether it is the chosen one.
    """
    if findings.costs.world > SIMULATED:
        return []
    return [
        [str(a.config), *map(short, (a.transfer, a.compute, a.update, a.onward)), int(is_chosen)]
        for a, is_chosen in notable_alternatives(findings, layer.name, ALTERNATIVES)
    ]


def _drawing(drawing: Drawing, plan: Plan, findings: Findings) -> dict[str, Any]:
    graph = findings.costs.graph
    place = {layer.name: i for i, layer in enumerate(graph.layers)}
    home = {name: i for i, block in enumerate(drawing.blocks) for name in block.layers}
    moved: dict[tuple[int, int], float] = {}
    for layer in graph.layers:
        for index, name in value_operands(layer):
            edge = home[name], home[layer.name]
            moved[edge] = moved.get(edge, 0.0) + _moved(plan, findings, layer, index, name)
    return {
        "width": round(drawing.width),
        "height": round(drawing.height),
        "block": [WIDTH, HEIGHT],
        "blocks": [
            [round(block.x), round(block.y), [place[name] for name in block.layers]]
            for block in drawing.blocks
        ],
        "edges": [
            {
                "ends": [edge.source, edge.target],
                "bytes": round(moved[edge.source, edge.target]),
                "points": [[round(x), round(y)] for x, y in edge.points],
            }
            for edge in drawing.edges
        ],
    }


def _moved(plan: Plan, findings: Findings, layer: Layer, index: int, name: str) -> float:
    """Bytes between two layers in a step; inputs are read in parts, so that nothing moves."""
    costs = findings.costs
    graph: LayerGraph = costs.graph
    if graph[name].is_input:
        return 0.0
    pair = plan.config(graph[name], graph), plan.config(layer, graph)
    return costs.transfer(graph[name], layer, index, pair)[1]


# -- predicted against measured --------------------------------------------------------------------


def bars(findings: Findings | None, traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Seconds per layer in each trace; the same sums for both, so that they can be compared."""
    if findings is not None:
        names = [layer.name for layer in findings.costs.graph.layers]
    else:
        spans = (span for trace in traces.values() for span in trace.spans)
        names = list(dict.fromkeys(span.name for span in spans if span.kind == "forward"))
    found = {label: per_layer(trace, names) for label, trace in traces.items()}
    extra = dict.fromkeys(name for rows in found.values() for name in rows if name not in names)
    shown = [n for n in (*names, *extra) if any(sum(r.get(n, ())) > 0 for r in found.values())]
    nothing = [0.0] * len(PARTS)
    return {
        "parts": PARTS,
        "layers": shown,
        "seconds": {
            label: [rows.get(name, nothing) for name in shown] for label, rows in found.items()
        },
    }


# -- the HTML file: template, style and scripts of `assets` around the data ------------------------


def render(data: dict[str, Any]) -> str:
    """The page: it loads nothing, so that it works offline and as an attachment."""
    folder = files("shardwise.report") / "assets"

    def part(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    filled = {
        "TITLE": escape(str(data["title"])),
        "STYLE": part("page.css"),
        "DATA": _embedded(data),
        "SCRIPT": "\n".join(map(part, SCRIPTS)),
    }
    page = part("page.html")
    pieces = [piece.split("}}", 1) for piece in page.split("{{")]
    return pieces[0][0] + "".join(filled[name] + rest for name, rest in pieces[1:])


def _embedded(data: dict[str, Any]) -> str:
    """JSON that no name in it can end early: "<" is written as an escape."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def write_page(path: str | Path, data: dict[str, Any]) -> None:
    """Writes the page to a file."""
    try:
        write_whole(path, render(data).encode(errors="replace"))
    except OSError as error:
        raise ShardwiseError(f"the report {str(path)!r} cannot be written: {error}") from None
