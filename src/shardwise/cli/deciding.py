"""Commands that decide: `plan` and `simulate`."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import (
    AsJson,
    Batch,
    Classes,
    ClusterWorkers,
    Gradients,
    Html,
    MachineOption,
    Memory,
    Model,
    Options,
    Shapes,
    Split,
    model_spec,
    wide_console,
    working,
)


def plan(
    model: Model,
    cluster: MachineOption = "local",
    workers: ClusterWorkers = None,
    batch: Batch = None,
    shape: Shapes = None,
    memory: Memory = None,
    gradients: Gradients = "buckets:8MiB",
    output: Annotated[
        str, typer.Option(help="full: every rank gets the whole output; local: its part.")
    ] = "full",
    explain: Annotated[
        list[str] | None, typer.Option(metavar="LAYER", help="Show this layer's alternatives.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    html: Html = None,
    json: AsJson = False,
    num_classes: Classes = None,
    option: Options = None,
) -> None:
    """Find the best split of every layer, and compare it with others.

    Costs come from the cluster's description; --cluster takes the file that `shardwise probe`
    writes, so that they are measured.
    """
    from shardwise.cli.tables import explain_table, trace_lines
    from shardwise.planner.shown_plan import as_data, plan_table, rivals_table
    from shardwise.report import contents, title_of, write_page
    from shardwise.specs.plan_spec import PlanRequest, best_plan

    spec = model_spec(model, shape, batch, option, num_classes)
    request = PlanRequest(spec, cluster, workers, output=output)
    with working(f"planning {model}"):
        found = best_plan(request.costs(), gradients, memory)
    if save is not None:
        found.save(save)
    if html is not None:
        write_page(html, contents(found, title_of(model, found)))
    console = wide_console()
    if json:
        print(dumps(as_data(found, explain or [])))
        return
    for layer in explain or []:
        console.print(explain_table(found, layer))
    if not explain:
        console.print(plan_table(found), rivals_table(found))
    for line in [*trace_lines(found.findings.trace), *found.idle()]:
        console.print(line, soft_wrap=True, markup=False)


def simulate(
    model: Model,
    cluster: MachineOption = "local",
    workers: ClusterWorkers = None,
    batch: Batch = None,
    shape: Shapes = None,
    plan: Annotated[str, typer.Option(help="auto (the best found), owt, or a plan file.")] = "auto",
    split: Split = None,
    gradients: Gradients = "buckets:8MiB",
    trace: Annotated[
        Path | None, typer.Option(help="Write the step as a Perfetto trace to this file.")
    ] = None,
    html: Html = None,
    json: AsJson = False,
    num_classes: Classes = None,
    option: Options = None,
) -> None:
    """Simulate one training step on a cluster, on thousands of workers if need be."""
    from shardwise.cli.tables import trace_lines
    from shardwise.report import contents, title_of, write_page
    from shardwise.specs.plan_spec import PlanRequest, PlanSpec, examined, simulated, trace_data

    spec = model_spec(model, shape, batch, option, num_classes)
    chosen = PlanSpec.parse(plan, split)
    request = PlanRequest(spec, cluster, workers, gradients=gradients, plan=chosen)
    with working(f"simulating {model}"):
        if html is None:
            step = simulated(request)
        else:
            found = examined(request)
            step = found.findings.trace
            write_page(html, contents(found, title_of(model, found)))
    if trace is not None:
        step.save(trace)
    if json:
        print(dumps(trace_data(step)))
        return
    for line in trace_lines(step):
        print(line)
