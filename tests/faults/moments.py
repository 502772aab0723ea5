"""Every operation on files is a moment at which a process can end, or the system can refuse."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate")
Strike = Callable[[str], None]


def die(_: str) -> None:
    """As kill -9 would."""
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(operation: str) -> None:
    """As a full disk does; what only removes goes on."""
    if operation not in ("os.remove", "os.rmdir"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Moments:
    """Counts what is done to the files of a folder, and strikes at one of these moments."""

    def __init__(self, folder: Path, at: int, strike: Strike) -> None:
        self.folder, self.left, self.strike = str(folder), at, strike

    def holds(self, path: object) -> bool:
        return isinstance(path, (str, Path)) and str(path).startswith(self.folder + os.sep)

    def pass_by(self, operation: str) -> None:
        self.left -= 1
        if self.left == 0:
            self.strike(operation)


class Torn:
    """A file whose every write is two, with a moment between them."""

    def __init__(self, file: Any, moments: Moments) -> None:
        self._file, self._moments = file, moments

    def write(self, content: Any) -> int:
        half = len(content) // 2
        self._file.write(content[:half])
        self._file.flush()
        self._moments.pass_by("write")
        self._file.write(content[half:])
        return len(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


_present: Moments | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    moments = _present
    if moments is None or not args or not moments.holds(args[0]):
        return
    if event in CHANGES or (event == "open" and args[2] & WRITING):
        moments.pass_by(event)


sys.addaudithook(_watch)


@contextmanager
def striking(folder: Path, at: int, strike: Strike) -> Iterator[Moments]:
    """Within, the n-th thing that is done to the files of a folder is struck."""
    global _present
    moments, opened, synced = Moments(folder, at, strike), io.open, os.fsync

    def open_torn(path: Any, mode: str = "r", *args: Any, **how: Any) -> Any:
        file = opened(path, mode, *args, **how)
        return Torn(file, moments) if moments.holds(path) and set(mode) & set("wax+") else file

    def sync_late(handle: int) -> None:
        moments.pass_by("fsync")
        synced(handle)

    io.open = builtins.open = open_torn  # type: ignore[assignment]
    os.fsync, _present = sync_late, moments  # type: ignore[assignment]
    try:
        yield moments
    finally:
        io.open = builtins.open = opened
        os.fsync, _present = synced, None


def killed_at(moment: int, folder: Path, action: Callable[[], None]) -> bool:
    """Runs it in a fork that is killed at a moment; whether the moment was reached."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with striking(folder, moment, die):
                action()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed by itself"
    return os.WIFSIGNALED(status)
