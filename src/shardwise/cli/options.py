"""Options that several commands have, and how commands print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.specs.model_spec import ModelSpec

Workers = Annotated[
    int | None,
    typer.Option(help="Number of workers: processes of this machine. (default: 2)"),
]
Split = Annotated[
    str | None,
    typer.Option(help="The same split for every layer, such as n=2,h=2 (axes n d h w f c)."),
]
Model = Annotated[
    str,
    typer.Argument(help="A zoo name, package.module:callable, file.py:callable or net.prototxt."),
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
Inference = Annotated[
    bool, typer.Option("--inference", help="For inference: evaluation mode, forward only.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a report: one HTML page, works offline.")
]


def wide_console() -> Console:
    """As wide as the terminal; wide enough for tables where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def working(what: str) -> Any:
    """Shows on the terminal, within, what is being done."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def model_spec(
    model: str,
    shapes: list[str] | None,
    batch: int | None,
    option: list[str] | None,
    num_classes: int | None,
) -> ModelSpec:
    """The model that a command is about."""
    from shardwise.specs.model_spec import ModelSpec, parse_options, parse_shape

    options = parse_options(option or [])
    if num_classes is not None:
        options["num_classes"] = num_classes
    return ModelSpec(model, tuple(map(parse_shape, shapes or [])), batch, options)
