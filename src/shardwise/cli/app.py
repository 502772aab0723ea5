"""The `shardwise` command: each subcommand is one call of the library, then printing.

What a command needs is imported when it runs, so that help comes at once.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Annotated

import typer

from shardwise.cli.models import kernels, plan, probe, simulate, verify
from shardwise.cli.running import emulate, export, pack, report, train
from shardwise.errors import LostPeer, ShardwiseError, WorkerError
from shardwise.version import __version__

app = typer.Typer(
    help="Splits every layer of a CNN over workers and computes exactly what one device computes.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (verify, train, pack, plan, simulate, kernels, report, export, probe, emulate):
    app.command()(command)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; a user's mistake is one line, not a traceback, and exit code 2."""
    try:
        app(arguments)
    except SystemExit as end:
        if arguments is None and "torch" in sys.modules:
            _leave(end.code)
        raise
    except LostPeer as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # at once: threads may still wait for the peer
    except ShardwiseError as error:
        _end(error, 2)
    except WorkerError as error:
        _end(error, 3)


def _leave(code: int | str | None) -> None:
    """Ends a rank that a launcher has started, before Python takes down what its threads stand on.

    A thread that is inside torch at that moment aborts the process, after all was done: it was seen
    once in some twenty runs on a loaded machine. MPI must be ended as Python does it.
    """
    from shardwise.launch.launchers import under_launcher

    if under_launcher() and "mpi4py" not in sys.modules and not isinstance(code, str):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _end(error: Exception, code: int) -> None:
    from shardwise.launch.launchers import end_all

    print(f"error: {error}", file=sys.stderr)
    end_all(code)


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
