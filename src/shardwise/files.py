"""Files: a reader finds the old content or the new, and whether it is what was written."""

from __future__ import annotations

import json
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4
from zlib import crc32

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from typing_extensions import Self

from shardwise.errors import ShardwiseError

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


@contextmanager
def system_errors_as(sentence: str) -> Iterator[None]:
    """What the system refuses becomes one sentence, which ends with the reason.

    >>> with system_errors_as("none.json cannot be read"):
    ...     open("none.json")
    Traceback (most recent call last):
    shardwise.errors.ShardwiseError: none.json cannot be read: No such file or directory
    """
    try:
        yield
    except OSError as error:
        raise ShardwiseError(f"{sentence}: {error.strerror or error}") from None


class Strict(BaseModel):
    """What a file says: exactly its fields, of exactly their types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Checked(Strict):
    """A whole file; its fields `format` and `version` say which kind it is."""

    what: ClassVar[str]  # it is, in messages
    indent: ClassVar[int | None] = None

    def to_json(self) -> str:
        fields = self.model_dump(mode="json")
        content = {"format": fields["format"], "version": fields["version"], **fields}
        return json.dumps({**content, "crc32": _checksum(content)}, indent=self.indent) + "\n"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads and checks it; every mistake is one sentence that names the file and the field."""
        with system_errors_as(f"{path} cannot be read"):
            written = path.read_bytes()
        try:
            content = json.loads(written.decode())
            given = content.pop("crc32", None) if isinstance(content, dict) else None
            checksum = _checksum(content)
        except (ValueError, RecursionError):
            raise ShardwiseError(f"{path} is damaged: it is no JSON") from None
        wanted = {name: cls.model_fields[name].default for name in ("format", "version")}
        if not isinstance(content, dict) or content.get("format") != wanted["format"]:
            raise ShardwiseError(f"{path} is not {cls.what}")
        if given != checksum:
            raise ShardwiseError(f"{path} is damaged: it does not have its checksum")
        if content.get("version") != wanted["version"]:
            raise ShardwiseError(
                f"{path} is of version {content.get('version')!r}, and this shardwise reads "
                f"version {wanted['version']}"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ShardwiseError(f"{path}: {first_mistake(error)}") from None


def first_mistake(error: ValidationError, whole: str = "the file") -> str:
    """The first field that is wrong, and why; `whole` where it is no single field."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"][:8])) or whole
    message = first["msg"].removeprefix("Value error, ")
    return " ".join(": ".join(filter(None, (place, message))).split())  # one line


def _checksum(content: Any) -> int:
    """Of what a file says, however it is spaced and ordered."""
    return crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


@dataclass
class TimesFile:
    """What was measured on this machine: seconds in a JSON file, which processes add to."""

    seconds: dict[str, Any] = field(default_factory=dict, kw_only=True)

    format: ClassVar[str]
    kind: ClassVar[TypeAdapter[Any]]  # of the seconds
    what: ClassVar[str]  # it holds, in messages
    remedy: ClassVar[str]  # where the file cannot be read
    raises: ClassVar[bool]  # where the file cannot be used; else that is said, and done without

    @property
    def name(self) -> str:
        """What the seconds are of: the file is called so."""
        raise NotImplementedError

    @property
    def path(self) -> Path:
        """Where the file is; SHARDWISE_CACHE names another folder."""
        home = os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise"
        return Path(home) / f"{''.join(c if c.isalnum() else '-' for c in self.name)}.json"

    @classmethod
    def load(cls, *of: Any) -> Self:
        """What was measured before, perhaps nothing."""
        found = cls(*of)
        try:
            content = json.loads(found.path.read_text())
            if content["format"] != cls.format:
                raise ValueError(f"format {content['format']!r} is not {cls.format!r}")
            found.seconds = cls.kind.validate_python(content["seconds"])
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = first_mistake(error) if isinstance(error, ValidationError) else error
            place = f"the {cls.what} in {str(found.path)!r}"
            cls._refuse(f"{place} cannot be read ({reason}); {cls.remedy}")
        return found

    def save(self) -> None:
        """Adds these times to those on disk, where another may have put some meanwhile."""
        about = asdict(self)
        try:
            with alone_with(self.path):
                own = about.pop("seconds")
                known = type(self).load(*about.values()).seconds
                content = {"format": self.format, **about, "seconds": _merged(known, own)}
                write_whole(self.path, json.dumps(content, indent=1))
        except OSError as error:
            place = f"the {self.what} cannot be kept in {str(self.path)!r}"
            self._refuse(f"{place}: {error.strerror or error}")

    @classmethod
    def _refuse(cls, sentence: str) -> None:
        if cls.raises:
            raise ShardwiseError(sentence) from None
        warnings.warn(sentence, stacklevel=3)


def _merged(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Both; the new value where both have one, and both values where these are tables again."""
    inner = {key: _merged(known.get(key, {}), v) for key, v in new.items() if isinstance(v, dict)}
    return known | new | inner
