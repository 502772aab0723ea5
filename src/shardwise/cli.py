"""The `shardwise` command: each subcommand is one call of the library, then printing."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise import __version__
from shardwise.errors import ShardwiseError
from shardwise.launch import WorkerError, choose_world
from shardwise.models import parse_options, parse_shape, parse_split
from shardwise.train import Settings, train_digits
from shardwise.verification import PlanResult, Request, summary, verify_model

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
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)


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


@app.command()
def verify(
    model: Annotated[
        str,
        typer.Argument(help="A zoo name, package.module:callable or file.py:callable."),
    ],
    workers: Workers = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="Input shape, such as 2x3x224x224; once per input of the model."
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
    num_classes: Annotated[
        int | None, typer.Option(help="Passed on to the callable that builds the model.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Passed on to the callable that builds the model."),
    ] = None,
) -> None:
    """Prove that plans compute what one device computes.

    Trains the model three steps in float64, under each plan and on one device, and compares
    outputs, losses, every gradient, running statistics and weights. Without --plan, --split or
    --random-plans, the samples are split over the workers. Exit code 1 means that some tensor
    differs by more than rounding. Also runs under torchrun.
    """
    options = parse_options(option or [])
    if num_classes is not None:
        options["num_classes"] = num_classes
    request = Request(
        spec=model,
        workers=workers,
        shapes=tuple(map(parse_shape, shape or [])),
        batch=batch,
        plan_file=plan,
        split=parse_split(split) if split is not None else {},
        num_random=random_plans,
        seed=seed,
        options=options,
    )
    with Console(stderr=True).status(f"verifying {model}"):
        results = verify_model(request)
    _print_results(results)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _print_results(results: list[PlanResult]) -> None:
    """A table per plan and one line about all; nothing on ranks that have no results."""
    console = Console(highlight=False)
    for result in results:
        console.print(_table(result))
    if results:
        console.print(summary(results), soft_wrap=True)


def _table(result: PlanResult) -> Table:
    table = Table(title=escape(result.label), title_justify="left")
    table.add_column("compared")
    table.add_column("tensors", justify="right")
    table.add_column("worst tensor")
    table.add_column("relative error", justify="right")
    table.add_column("")
    for row in result.by_kind():
        verdict = "[green]ok" if row.passed else "[bold red]FAILED"
        error = f"{row.worst.error:.1e}"
        table.add_row(row.kind, str(row.num_tensors), escape(row.worst.name), error, verdict)
    return table


@app.command()
def train(
    workers: Workers = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.")] = 10,
    batch: Annotated[int, typer.Option(help="Samples per step, over all workers.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate at the start.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the shuffle.")] = 0,
    split: Split = None,
) -> None:
    """Train a small network on scikit-learn's digits.

    Runs on local workers, or on those that torchrun has started. Without --split, the samples are
    split over the workers.
    """
    degrees = parse_split(split) if split is not None else {}
    world = choose_world(workers, degrees)
    start = time.perf_counter()
    history = train_digits(Settings(world, epochs, batch, lr, seed, degrees))
    if history:
        seconds = time.perf_counter() - start
        accuracy = 100 * history[-1].accuracy
        print(f"test accuracy {accuracy:.2f} % after {epochs} epochs, {seconds:.0f} s in all")
