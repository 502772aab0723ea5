"""The report of a run, from the files that training leaves in its folder.

| file            | what                                                                          |
|-----------------|-------------------------------------------------------------------------------|
| `plan.json`     | the plan, as `Plan.save` writes it                                             |
| `config.json`   | an object: the settings of the run; see `RunConfig` for what is understood     |
| `metrics.jsonl` | an object per line: `step` or `epoch`, and numbers such as `loss`, `accuracy`, |
|                 | `samples_per_second`; `memory_bytes` is a list with a number per rank          |
| `trace.json`    | a recorded step, as `Trace.save` writes it                                     |

The first two must be there; the others need not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.errors import ShardwiseError
from shardwise.files import first_mistake
from shardwise.plans.plan import Plan
from shardwise.plans.trace import Trace
from shardwise.report.history import read_history
from shardwise.report.page import OtherRun, contents, title_of, write_page
from shardwise.specs.model_spec import ModelSpec
from shardwise.specs.request import PlanRequest, examined

PLAN, CONFIG, METRICS, TRACE = "plan.json", "config.json", "metrics.jsonl", "trace.json"
PAGE = "report.html"


class RunConfig(BaseModel):
    """What a report understands of a run's settings; it shows the others as they are."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None  # as on the command line; without, the report has no costs
    options: dict[str, Any] = {}  # of the callable that builds the model
    cluster: str = "local"
    gradients: str = "buckets:8MiB"
    output: str = Field("full", pattern="^(full|local)$")


def write_report(
    folder: str | Path,
    out: str | Path | None = None,
    plan: Plan | None = None,
    others: Sequence[str | Path] = (),
) -> Path:
    """Writes the report of a run and returns its path; `report.html` in the folder by default.

    The curves of other runs are drawn beside its own. A plan that has been examined already saves
    planning time, and need not be in a file.

    >>> write_report("runs/digits")
    PosixPath('runs/digits/report.html')
    """
    home = Path(folder)
    if not home.is_dir():
        raise ShardwiseError(f"{str(folder)!r} is not the folder of a run")
    settings, config = _read_config(home / CONFIG)
    if plan is None or plan.findings is None:
        plan = _examined(plan or Plan.load(home / PLAN), config, home)
    history = _history(home)
    trace = Trace.load(home / TRACE) if (home / TRACE).exists() else None
    title = title_of(config.model or home.resolve().name, plan)
    path = Path(out) if out is not None else home / PAGE
    write_page(path, contents(plan, title, trace, history, settings, others=_others(others)))
    return path


def _history(home: Path) -> list[dict[str, Any]]:
    return read_history(home / METRICS) if (home / METRICS).exists() else []


def _others(folders: Sequence[str | Path]) -> dict[str, OtherRun]:
    """By the names of their folders, or by whole paths where two have one name."""
    names = [Path(folder).resolve().name for folder in folders]
    found = {}
    for name, folder in zip(names, folders, strict=True):
        if not Path(folder).is_dir():
            raise ShardwiseError(f"{str(folder)!r} is not the folder of a run")
        settings, _ = _read_config(Path(folder) / CONFIG)
        key = name if names.count(name) == 1 else str(folder)
        found[key] = OtherRun(settings, _history(Path(folder)))
    return found


def _read_config(path: Path) -> tuple[dict[str, Any], RunConfig]:
    """The settings of the run as they are, and what is understood of them."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ShardwiseError(f"the run's settings {str(path)!r} cannot be read: {error}") from None
    except (ValueError, RecursionError):
        raise ShardwiseError(f"{str(path)!r} is not JSON") from None
    if not isinstance(data, dict):
        raise ShardwiseError(f"{str(path)!r} must hold one JSON object, the settings of the run")
    try:
        return data, RunConfig.model_validate(data)
    except ValidationError as error:
        raise ShardwiseError(f"{str(path)!r}: {first_mistake(error)}") from None


def _examined(plan: Plan, config: RunConfig, home: Path) -> Plan:
    """The plan with its costs, where the model can be made again."""
    if config.model is None:
        return plan
    request = PlanRequest(
        ModelSpec(config.model, plan.inputs, options=config.options),
        config.cluster,
        plan.world,
        gradients=config.gradients,
        output=config.output,
    )
    try:
        return examined(request, plan)
    except ShardwiseError as error:
        raise ShardwiseError(f"the plan of {str(home)!r}: {error}") from None
