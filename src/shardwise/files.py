"""Writing files: a reader finds the old content or the new, whatever happens meanwhile."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

PATIENCE = 10.0  # seconds for a lock whose holder may have been stopped


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Replaces a file in one go.

    >>> write_whole("plan.json", "{}")
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as new, new.open("wb") as file:
        file.write(data)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A new file beside a path, which takes its place once it is written and on the disk.

    What is no file but is written to, as a pipe or /dev/stdout, is not replaced.
    """
    target = Path(os.path.realpath(path))  # a link goes on to point there
    if target.exists() and not target.is_file():
        yield target
        return
    new = target.with_name(f".{target.name[:40]}.{uuid4().hex[:8]}.tmp")
    try:
        yield new
        sync(new)
        if target.exists():
            new.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(new, target)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Returns when a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Within, no other process that asks for the same reads, changes and replaces this file."""
    if fcntl is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)  # the folder is locked: there need be no other file
    try:
        end = time.monotonic() + PATIENCE
        while not _locked(handle) and time.monotonic() < end:
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Whether the lock is ours now; a file system without locks does without."""
    assert fcntl is not None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
