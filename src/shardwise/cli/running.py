"""Commands around training runs: `train`, `pack`, `report`, `export` and `emulate`."""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.options import working
from shardwise.errors import ShardwiseError
from shardwise.training.settings import Settings, read_settings


def _signature() -> inspect.Signature:
    """The parameters of `train`, as typer reads them: a settings file, and every setting."""
    argument = Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.YAML]", help="Settings; options count more.")
    ]
    annotations = {"config": argument, **{name: _option(name) for name in Settings.model_fields}}
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(n, kind, default=None, annotation=a) for n, a in annotations.items()]
    )


def _option(name: str) -> Any:
    """The option of one setting; what it may be is checked by the settings themselves."""
    field = Settings.model_fields[name]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    flag = f"--{name.replace('_', '-')}"
    help_text = (field.description or "") + _default(field.default)
    common: dict[str, Any] = {
        "help": help_text,
        "rich_help_panel": extra["panel"],
        "show_default": False,
    }
    if name == "options":
        return Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", **common)]
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **common)]
    return Annotated[str | None, typer.Option(flag, metavar=_metavar(field), **common)]


def _metavar(field: Any) -> str:
    """How the value is written: as one of a few words, a number, numbers or text."""
    text = str(field.annotation)
    if "Literal" in text:
        return "|".join(field.annotation.__args__)
    if "tuple" in text:
        return "N,N"
    return "NUMBER" if "int" in text or "float" in text else "TEXT"


def _default(value: Any) -> str:
    if value is None or value in ("", (), {}) or isinstance(value, bool):
        return ""
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f" (default: {shown})"


def train(config: Path | None, **options: Any) -> None:
    """Train a model, as settings say: those of a YAML file, and those of the command line.

    With nothing given it trains a small network on scikit-learn's digits. Runs on local workers, or
    on those that torchrun, mpirun or srun has started. Settings, metrics, checkpoints and a report
    are written to the folder of the run; a run that was ended goes on with --resume, on any number
    of workers. SIGTERM makes a checkpoint and ends.
    """
    from shardwise.specs.model_spec import parse_options
    from shardwise.training.trainer import train as run_training

    given = {name: value for name, value in options.items() if value is not None}
    if "options" in given:
        given["options"] = parse_options(given["options"])
    settings, start = read_settings(config, given), time.perf_counter()
    history = run_training(settings)
    if history and (accuracy := history[-1].accuracy) is not None:
        seconds, number = time.perf_counter() - start, history[-1].number
        epochs = "1 epoch" if number == 1 else f"{number} epochs"
        print(f"test accuracy {100 * accuracy:.2f} % after {epochs}, {seconds:.0f} s in all")


train.__signature__ = _signature()  # type: ignore[attr-defined]
train.__annotations__ = {n: p.annotation for n, p in _signature().parameters.items()}


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
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    from shardwise import data
    from shardwise.data.opening import open_lazily
    from shardwise.specs.model_spec import parse_shape

    height_width = parse_shape(size) if size is not None else None
    if height_width is not None and len(height_width) != 2:
        raise ShardwiseError(f"--size {size} must be height x width, such as 224x224")
    given = {"subset": subset, "size": height_width, "num_classes": num_classes}
    opened = open_lazily(source, on_error, **given)
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
    from shardwise.report import write_report

    with working(f"reporting on {run}"):
        page = write_report(run, out)
    print(f"written to {page}")


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    out: Annotated[
        Path,
        typer.Argument(
            help="What to write: a .pt or .safetensors file, or a folder for torch DCP."
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Which step. (default: the last)")] = None,
) -> None:
    """Write a checkpoint of a run for plain torch, and the original nn.Module.

    A file gets the state_dict; a name without ending is a folder of torch.distributed.checkpoint,
    with the state of the optimizer too.
    """
    from shardwise.checkpoint import export as export_state

    print(f"written to {export_state(run, out, step)}")


def emulate(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD", help="The command that every rank runs.")
    ],
    hosts: Annotated[int, typer.Option(help="Number of emulated hosts.")],
    link: Annotated[
        str, typer.Option(help="Rate of every host's link (1gbit), or of each (1gbit,500mbit).")
    ],
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
    from shardwise.launch.emulate import Wiring, run_on_hosts

    wiring = Wiring.of(hosts, link, per_switch, uplink)
    raise typer.Exit(run_on_hosts(wiring, command, per_host, grace))
