"""A small run with everything in it: a plan with branches and many splits, a step, a history."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np

from shardwise import Plan
from shardwise.plans.trace import Span, Trace
from shardwise.specs.model_spec import ModelSpec
from shardwise.specs.request import PlanRequest, examined

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.left = nn.Conv2d(8, 8, 1)
        self.right = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        linear = nn.Linear(24 * 64, 16), nn.ReLU(), nn.Linear(16, 10)
        self.head = nn.Sequential(nn.Flatten(), *linear)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.cat([self.left(x), self.right(x), x], 1))
"""
SHAPE = (8, 3, 8, 8)
SPLITS = {"left": {"h": 2, "w": 2}, "right.0": {"f": 4}, "head.1": {"c": 4}, "head.3": {"f": 2}}


@cache
def examined_plan(folder: Path) -> Plan:
    """Samples are split, but for some layers; with its costs."""
    (folder / "net.py").write_text(NET)
    request = PlanRequest(ModelSpec(f"{folder / 'net.py'}:Net", (SHAPE,)), "4x10Gb", 4)
    graph = request.costs().graph
    special = {name: Plan.uniform(graph, 4, **split) for name, split in SPLITS.items()}
    usual = Plan.uniform(graph, 4, n=4)
    plan = Plan.make(graph, 4, lambda layer: special.get(layer.name, usual).layers[layer.name])
    return examined(request, plan)


def recorded(simulated: Trace) -> Trace:
    """As if the step had been measured: everything a quarter slower."""
    spans = [
        Span(
            span.name,
            span.kind,
            span.lane,
            1.25 * span.starts,
            1.25 * span.ends,
            None if span.blocked is None else 1.25 * span.blocked,
        )
        for span in simulated.spans
    ]
    return Trace(simulated.world, spans)


def other_run(folder: Path) -> Path:
    """A second run, whose loss falls more slowly."""
    run = folder / "slower"
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps({"cluster": "4x10Gb", "epochs": 3, "lr": 0.01}))
    lines = [{"step": step, "loss": float(np.exp(-step / 90)) + 0.1} for step in range(1, 121)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def run_folder(folder: Path) -> Path:
    """The folder of a finished run."""
    plan = examined_plan(folder)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    plan.save(run / "plan.json")
    config = {"model": f"{folder / 'net.py'}:Net", "cluster": "4x10Gb", "epochs": 3, "lr": 0.1}
    (run / "config.json").write_text(json.dumps(config))
    lines = [
        {
            "step": step,
            "loss": float(np.exp(-step / 40)) + 0.1,
            "samples_per_second": 900 + step % 7,
            **({"test_accuracy": 1 - float(np.exp(-step / 30))} if step % 10 == 0 else {}),
        }
        for step in range(1, 121)
    ]
    lines.append({"step": 60, "memory_bytes": [150_000 + 1000 * rank for rank in range(4)]})
    lines.append({"step": 121, "memory_bytes": [200_000 + 1000 * rank for rank in range(4)]})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded(plan.findings.trace).save(run / "trace.json")
    return run
