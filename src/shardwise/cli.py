"""The `shardwise` command: each subcommand is one call of the library, then printing."""

from __future__ import annotations

import os
import sys
import time
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from shardwise import data
from shardwise.checkpoint import export as export_state
from shardwise.comm import LostPeer
from shardwise.data.opening import open_lazily
from shardwise.emulate import Wiring, run_on_hosts
from shardwise.errors import ShardwiseError
from shardwise.kernel_table import Wish, kernel_table, time_kernels
from shardwise.launch import WorkerError, end_all
from shardwise.models import parse_options, parse_shape, parse_split
from shardwise.planning import as_data
from shardwise.probing import probe as probe_machine
from shardwise.questions import Question, answer, examined, simulated, trace_data
from shardwise.report import contents, title_of, write_page, write_report
from shardwise.tables import explain_table, plan_table, rivals_table, trace_lines, verify_table
from shardwise.training import Settings
from shardwise.training import train as run_training
from shardwise.training.options import with_options
from shardwise.verify.inputs import parse_input
from shardwise.verify.model import Request, verify_model
from shardwise.verify.results import PlanResult, summary
from shardwise.version import __version__

app = typer.Typer(
    help="Splits every layer of a CNN over workers and computes exactly what one device computes.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; a user's mistake is one line, not a traceback, and exit code 2."""
    try:
        app(arguments)
    except LostPeer as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # at once: threads may still wait for the peer
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        end_all(2)
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        end_all(3)


def _version(asked: bool) -> None:
    if asked:
        print(f"shardwise {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


Workers = Annotated[
    int | None,
    typer.Option(help="Number of workers: processes of this machine. (default: 2)"),
]
Split = Annotated[
    str | None,
    typer.Option(help="The same split for every layer, such as n=2,h=2 (axes n d h w f c)."),
]


Model = Annotated[
    str, typer.Argument(help="A zoo name, package.module:callable or file.py:callable.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--input", help="Input shape, such as 2x3x224x224; once per input of the model."),
]
Options = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Passed on to the callable that builds the model."),
]
Classes = Annotated[
    int | None, typer.Option(help="Passed on to the callable that builds the model.")
]


@app.command()
def verify(
    model: Model,
    workers: Workers = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="Input shape, such as 2x3x224x224; once per input of the model. 2x16:int64:1000 "
            "is one of whole numbers below 1000.",
        ),
    ] = None,
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
    inputs = [parse_input(text) for text in shape or []]
    request = Request(
        spec=model,
        workers=workers,
        shapes=tuple(dims for dims, _ in inputs),
        kinds=tuple(kind for _, kind in inputs),
        batch=batch,
        plan_file=plan,
        split=parse_split(split) if split is not None else {},
        num_random=random_plans,
        seed=seed,
        training=not evaluate,
        dtype=dtype,
        device=device,
        options=_model_options(option, num_classes),
    )
    with Console(stderr=True).status(f"verifying {model}"):
        results = verify_model(request)
    _print_results(results)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _console() -> Console:
    """As wide as the terminal; wide enough for tables where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _model_options(option: list[str] | None, num_classes: int | None) -> dict[str, Any]:
    given = {} if num_classes is None else {"num_classes": num_classes}
    return parse_options(option or []) | given


def _print_results(results: list[PlanResult]) -> None:
    """A table per plan and a few lines about all; nothing on ranks that have no results."""
    console = Console(highlight=False)
    for result in results:
        console.print(verify_table(result))
    for line in summary(results) if results else ():
        console.print(line, soft_wrap=True, markup=False)


def _train(settings: Settings) -> None:
    """Train a model, as settings say: those of a YAML file, and those of the command line.

    With nothing given it trains a small network on scikit-learn's digits. Runs on local workers, or
    on those that torchrun, mpirun or srun has started. Settings, metrics, checkpoints and a report
    are written to the folder of the run; a run that was ended goes on with --resume, on any number
    of workers. SIGTERM makes a checkpoint and ends.
    """
    start = time.perf_counter()
    history = run_training(settings)
    if history and history[-1].accuracy is not None:
        seconds = time.perf_counter() - start
        accuracy = 100 * history[-1].accuracy
        number = history[-1].number
        epochs = "1 epoch" if number == 1 else f"{number} epochs"
        print(f"test accuracy {accuracy:.2f} % after {epochs}, {seconds:.0f} s in all")


app.command("train")(with_options(_train))


@app.command()
def pack(
    source: Annotated[
        str, typer.Argument(help="digits, synthetic:100x3x32x32, or a folder of samples.")
    ],
    folder: Annotated[Path, typer.Argument(help="The store to write; it must not exist.")],
    stripes: Annotated[int, typer.Option(help="Over how many files samples are dealt.")] = 32,
    on_error: Annotated[
        str, typer.Option(help="What a sample that cannot be read does: raise, or skip.")
    ] = "raise",
    subset: Annotated[
        str | None, typer.Option(help="Of digits and CIFAR-10: train, test or all.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Of a folder of images: resize them, such as 224x224.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Of arrays and synthetic samples.")
    ] = None,
) -> None:
    """Pack samples into a store: memory-mapped stripes with checksums, for reading in part.

    A folder holds CIFAR-10's binary files, images.npy and labels.npy, a zarr group with images and
    labels, JPEG and PNG images in a subfolder per class, or a store.
    """
    height_width = parse_shape(size) if size is not None else None
    if height_width is not None and len(height_width) != 2:
        raise ShardwiseError(f"--size {size} must be height x width, such as 224x224")
    opened = open_lazily(source, on_error, subset, height_width, num_classes)
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"packing {escape(source)}", total=len(opened))
        left_out = data.pack(
            opened,
            folder,
            num_stripes=stripes,
            on_error=on_error,
            sample_done=lambda: progress.advance(task),
        )
    for reason in left_out.values():
        print(f"left out: {reason}", file=sys.stderr)
    print(f"{len(opened) - len(left_out)} samples in {folder}, {len(left_out)} left out")


MachineOption = Annotated[
    str,
    typer.Option(help="A preset, a shorthand such as 4x10Gb or 2x4@1Gb/4:1, or a cluster file."),
]
ClusterWorkers = Annotated[
    int | None, typer.Option(help="Number of workers. (default: those of the cluster)")
]
Batch = Annotated[int | None, typer.Option(help="Samples per step. (default: 32 per worker)")]
Memory = Annotated[
    str | None,
    typer.Option(help="What a worker may use, such as 8GiB. (default: the cluster's)"),
]
Gradients = Annotated[
    str,
    typer.Option(
        help="When gradients are summed: end, layer, chunks:K (the last K layers first), "
        "chunks:auto (the best K) or buckets:SIZE."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a report: one HTML page, works offline.")
]


@app.command()
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
    request = Question(
        spec=model,
        cluster=cluster,
        workers=workers,
        batch=batch,
        shapes=tuple(map(parse_shape, shape or [])),
        memory=memory,
        gradients=gradients,
        output=output,
        options=_model_options(option, num_classes),
    )
    with Console(stderr=True).status(f"planning {model}"):
        found = answer(request)
    if save is not None:
        found.save(save)
    if html is not None:
        write_page(html, contents(found, title_of(model, found)))
    console = _console()
    if json:
        print(dumps(as_data(found, explain or [])))
        return
    for layer in explain or []:
        console.print(explain_table(found, layer))
    if not explain:
        console.print(plan_table(found), rivals_table(found))
    for line in [*trace_lines(found.findings.trace), *found.idle()]:
        console.print(line, soft_wrap=True, markup=False)


@app.command()
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
    request = Question(
        spec=model,
        cluster=cluster,
        workers=workers,
        batch=batch,
        shapes=tuple(map(parse_shape, shape or [])),
        gradients=gradients,
        plan=plan,
        split=parse_split(split) if split is not None else {},
        options=_model_options(option, num_classes),
    )
    with Console(stderr=True).status(f"simulating {model}"):
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


@app.command()
def kernels(
    model: Model,
    batch: Annotated[int, typer.Option(help="Samples per step.")] = 64,
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
    wish = Wish(
        spec=model,
        shape=parse_shape(shape[0]) if shape else None,
        batch=batch,
        threads=threads,
        layout=layout,
        memory=memory,
        exact=exact,
        options=_model_options(option, num_classes),
    )
    with Console(stderr=True).status(f"timing the kernels of {model}") as status:
        rows = time_kernels(wish, lambda name: status.update(f"timing {model}: {name}"))
    if json:
        print(dumps([row.data() for row in rows]))
    else:
        _console().print(kernel_table(model, rows))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    out: Annotated[
        Path | None, typer.Option(help="The page to write. (default: report.html in the folder)")
    ] = None,
) -> None:
    """Write the report of a training run: one HTML page, works offline.

    Shows the plan over the layer graph with its costs, predicted against measured times, the
    timeline of a step, curves of the training, memory, and the comparison with other plans.
    """
    with Console(stderr=True).status(f"reporting on {run}"):
        page = write_report(run, out)
    print(f"written to {page}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    out: Annotated[Path, typer.Argument(help="The file to write: .pt or .safetensors.")],
    step: Annotated[int | None, typer.Option(help="Which step. (default: the last)")] = None,
) -> None:
    """Write a checkpoint of a run as a plain state_dict, for the original nn.Module."""
    print(f"written to {export_state(run, out, step)}")


@app.command()
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
    questions = [
        Question(
            spec=model,
            batch=batch,
            shapes=tuple(map(parse_shape, shape or [])),
            options=_model_options(option, num_classes),
        )
        for model in models or []
    ]
    found = probe_machine(questions, workers, again, sums)
    if found is not None:
        found.save(out)
        print(found.to_yaml().rstrip())
        print(f"written to {out}; use it with --cluster {out}")


@app.command()
def emulate(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD", help="The command that every rank runs.")
    ],
    hosts: Annotated[int, typer.Option(help="Number of emulated hosts.")],
    link: Annotated[str, typer.Option(help="Rate of every host's link, such as 1gbit.")],
    per_switch: Annotated[int | None, typer.Option(help="Hosts on each switch.")] = None,
    uplink: Annotated[
        str | None, typer.Option(help="Rate of every switch's uplink. (default: as --link)")
    ] = None,
    per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    grace: Annotated[
        float, typer.Option(help="Seconds that ranks get to end after one has failed.")
    ] = 60.0,
) -> None:
    """Run a command on emulated hosts of this machine: network namespaces with shaped links.

    Sets the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, ...) and prefixes every
    line with its host. Needs root on Linux. Nothing is left behind, whatever happens.
    """
    wiring = Wiring.of(hosts, link, per_switch, uplink)
    raise typer.Exit(run_on_hosts(wiring, command, per_host, grace))
