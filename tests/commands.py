"""Runs what a document tells a reader to type, each in a process of its own.

Importing torch takes seconds. So `shardwise ...` and `python file.py` are run by children of the
fork server of the tests, which has imported it once; everything else is run by bash.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shlex
import subprocess
import sys
import traceback
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LIMIT = 300.0  # seconds for one command


def run_command(command: str, folder: Path, **environment: str) -> tuple[int, str]:
    """The exit code of a command in a folder, and all that it printed."""
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
    environment |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PATH": path}
    words, output = shlex.split(command, comments=True), folder / ".output"
    if words[0] == "make":  # it would make the environment that runs this
        command, folder = f"make --dry-run {' '.join(words[1:])}", ROOT
    is_python = words[0] == "python" and words[1].endswith(".py")
    if words[0] == "shardwise" or is_python:
        code = _fork(words, folder, output, environment)
    else:
        code = _bash(command, folder, output, environment)
    return code, output.read_text(errors="replace")


def _fork(words: list[str], folder: Path, output: Path, environment: dict[str, str]) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwise"])
    forkserver.ensure_running()
    arguments = (words, str(folder), str(output), environment, _address())
    process = context.Process(target=_become, args=arguments)
    output.touch()
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode or 0


def _address() -> object:
    """Where the fork server of the tests listens, if this Python says so."""
    return getattr(forkserver._forkserver, "_forkserver_address", None)  # type: ignore[attr-defined]


def _share_server(address: object) -> None:
    """Workers of this process come from that server: one of its own would import torch again."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server.ensure_running = lambda: None


def _become(
    words: list[str], folder: str, output: str, environment: dict[str, str], address: object
) -> None:
    """Makes this process the one that runs a command."""
    own_cache = "probe" in words  # what workers time goes to the cache of their environment
    if sys.version_info < (3, 14) and address is not None and not own_cache:
        _share_server(address)
    os.chdir(folder)
    os.environ.update(environment)
    with open(output, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    sys.argv = words[1:] if words[0] == "python" else words
    try:
        if words[0] == "python":
            program = Path(words[1]).resolve()  # from where workers read it again
            sys.path.insert(0, str(program.parent))
            runpy.run_path(str(program), run_name="__main__")
        else:
            from shardwise.cli.app import main

            main(words[1:])
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _bash(command: str, folder: Path, output: Path, environment: dict[str, str]) -> int:
    with output.open("wb") as file:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=folder,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
        )
    return done.returncode
