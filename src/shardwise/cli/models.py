"""Commands about models: `plan`, `simulate`, `verify`, `kernels` and `probe`."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import (
    AsJson,
    Batch,
    Classes,
    ClusterWorkers,
    Gradients,
    Html,
    Inference,
    MachineOption,
    Memory,
    Model,
    Options,
    Shapes,
    Split,
    Workers,
    model_spec,
    wide_console,
    working,
)

if TYPE_CHECKING:
    from shardwise.verify.results import PlanResult

Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Input shape, such as 2x3x224x224; once per input of the model. 2x16:int64:1000 "
        "is one of whole numbers below 1000.",
    ),
]


def plan(
    model: Model,
    cluster: MachineOption = "local",
    workers: ClusterWorkers = None,
    batch: Batch = None,
    shape: Shapes = None,
    memory: Memory = None,
    recompute: Annotated[
        str,
        typer.Option(
            help="Layers that the backward pass computes again: none, auto (where the memory asks "
            "for it) or all."
        ),
    ] = "none",
    gradients: Gradients = "buckets:8MiB",
    inference: Inference = False,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Another input shape to plan for as well, such as 1x4x96x128; once per size. "
            "With commas between the shapes of several inputs."
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            help="full: every rank gets the whole output; local: its part; one: rank 0 has it."
        ),
    ] = "full",
    explain: Annotated[
        list[str] | None, typer.Option(metavar="LAYER", help="Show this layer's alternatives.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER=SPLIT",
            help="Fix the split of a layer, such as conv1=h=4, and solve the rest; once per layer.",
        ),
    ] = None,
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER=SPLIT",
            help="Show what this split of a layer would cost, everything else solved anew.",
        ),
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Show what this plan file costs more.")
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
    from shardwise.cli.plan_questions import Questions, layer_splits
    from shardwise.report import contents, title_of, write_page
    from shardwise.specs.model_spec import parse_size
    from shardwise.specs.request import PlanRequest, planned

    questions = Questions(explain or [], layer_splits(why_not), diff)
    spec, sizes = model_spec(model, shape, batch, option, num_classes), map(parse_size, size or [])
    asked = {"output": output, "inference": inference, "sizes": tuple(sizes)}
    request = PlanRequest(spec, cluster, workers, **asked, pins=dict(layer_splits(pin)))
    with working(f"planning {model}"):
        found = planned(request.all_costs(), gradients, memory, recompute)
        answers = questions.answers(found)
    if save is not None:
        found.save(save)
    if html is not None:
        write_page(html, contents(found, title_of(model, found), answers=answers.why_not))
    if json:
        print(dumps(answers.data()))
    else:
        answers.show(wide_console())


def simulate(
    model: Model,
    cluster: MachineOption = "local",
    workers: ClusterWorkers = None,
    batch: Batch = None,
    shape: Shapes = None,
    plan: Annotated[str, typer.Option(help="auto (the best found), owt, or a plan file.")] = "auto",
    split: Split = None,
    gradients: Gradients = "buckets:8MiB",
    inference: Inference = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step as a Perfetto trace to this file.")
    ] = None,
    html: Html = None,
    json: AsJson = False,
    num_classes: Classes = None,
    option: Options = None,
) -> None:
    """Simulate one step on a cluster, on thousands of workers if need be."""
    from shardwise.cli.tables import trace_lines
    from shardwise.report import contents, title_of, write_page
    from shardwise.specs.plan_spec import PlanSpec
    from shardwise.specs.request import PlanRequest, examined, simulated, trace_data

    spec = model_spec(model, shape, batch, option, num_classes)
    chosen = PlanSpec.parse(plan, split)
    asked = {"gradients": gradients, "plan": chosen, "inference": inference}
    request = PlanRequest(spec, cluster, workers, **asked)
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


def verify(
    model: Model,
    workers: Workers = None,
    shape: Inputs = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Number of samples. (default: one per worker, at least 2)"),
    ] = None,
    plan: Annotated[str | None, typer.Option(help="A plan file to verify.")] = None,
    split: Split = None,
    random_plans: Annotated[int, typer.Option(help="How many random plans to verify.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the first random plan.")] = 0,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Compare the outputs of evaluation mode only.")
    ] = False,
    inference: Annotated[
        bool,
        typer.Option(
            "--inference",
            help="The same for plans for inference, for one sample, under torch.inference_mode.",
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Of weights and inputs: float64, float32, bfloat16 or float16.")
    ] = "float64",
    device: Annotated[str, typer.Option(help="Where all ranks compute: cpu or cuda.")] = "cpu",
    num_classes: Classes = None,
    option: Options = None,
) -> None:
    """Prove that plans compute what one device computes.

    Trains the model three steps, under each plan and on one device, and compares outputs, losses,
    every gradient, running statistics and weights. Without --plan, --split or --random-plans, the
    samples are split over the workers. A tensor that differs by more than its dtype usually rounds
    is judged by what one device makes of a change in the last bit. Exit code 1 means that some
    tensor differs by more than that. Also runs under torchrun or mpirun.
    """
    from shardwise.specs.plan_spec import PlanSpec
    from shardwise.verify.by_name import VerifyRequest, parse_input, verify_model

    inputs = [parse_input(text) for text in shape or []]
    meant = [] if plan is None else [PlanSpec(plan)]
    meant += [] if split is None else [PlanSpec.parse(None, split)]
    request = VerifyRequest(
        model_spec(model, [text for text, _ in inputs], batch, option, num_classes),
        workers,
        tuple(meant),
        num_random=random_plans,
        seed=seed,
        training=not (evaluate or inference),
        inference=inference,
        dtype=dtype,
        device=device,
        kinds=tuple(kind for _, kind in inputs),
    )
    with working(f"verifying {model}"):
        results = verify_model(request)
    _print_results(results)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _print_results(results: list[PlanResult]) -> None:
    """A table per plan and a few lines about all; nothing on ranks that have no results."""
    from rich.console import Console

    from shardwise.cli.tables import verify_table
    from shardwise.verify.results import summary

    console = Console(highlight=False)
    for result in results:
        console.print(verify_table(result))
    for line in summary(results) if results else ():
        console.print(line, soft_wrap=True, markup=False)


def kernels(
    model: Model,
    batch: Annotated[int | None, typer.Option(help="Samples per step. (default: 64)")] = None,
    shape: Shapes = None,
    threads: Annotated[
        int | None, typer.Option(help="Number of threads. (default: as torch has it)")
    ] = None,
    layout: Annotated[str, typer.Option(help="keep (NCHW) or channels_last.")] = "keep",
    memory: Annotated[
        str | None, typer.Option(help="Workspace of a kernel, such as 64MiB.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Without Winograd's kernels, which round more.")
    ] = False,
    json: AsJson = False,
    num_classes: Classes = None,
    option: Options = None,
) -> None:
    """Time every convolution kernel on every layer of a model, and show which one is fastest.

    One row for each layer and direction: Gflop/s of the stock operator and of each kernel. What was
    timed before is not timed again; times are in ~/.cache/shardwise (or $SHARDWISE_CACHE).
    """
    from shardwise.cli.tables import kernel_table, time_kernels

    spec = model_spec(model, shape, batch, option, num_classes)
    with working(f"timing the kernels of {model}") as status:
        how = (threads, layout, memory, exact)
        rows = time_kernels(spec, *how, lambda name: status.update(f"timing {model}: {name}"))
    if json:
        print(dumps([row.data() for row in rows]))
    else:
        wide_console().print(kernel_table(model, rows))


def probe(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Models whose layers are timed: as planning them will ask."),
    ] = None,
    workers: Workers = None,
    batch: Batch = None,
    shape: Shapes = None,
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.yaml"),
    again: Annotated[bool, typer.Option("--again", help="Time known layers anew.")] = False,
    sums: Annotated[
        bool, typer.Option("--sums", help="Find the fastest all-reduce by group and size.")
    ] = False,
    num_classes: Classes = None,
    option: Options = None,
) -> None:
    """Measure this machine, or the workers of a launcher, into a cluster file.

    Measures the links (latency and bandwidth of messages and of sums), the device, and the forward
    and backward time of every share of a layer that planning the given models needs. Times of
    layers are kept in ~/.cache/shardwise (or $SHARDWISE_CACHE) for the next time.
    """
    from shardwise.measure.cluster_file import probe as probe_machine

    specs = [model_spec(model, shape, batch, option, num_classes) for model in models or []]
    found = probe_machine(specs, workers, again, sums)
    if found is not None:
        found.save(out)
        print(found.to_yaml().rstrip())
        print(f"written to {out}; use it with --cluster {out}")
