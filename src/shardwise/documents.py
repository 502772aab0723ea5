"""Files of JSON that are written here and read again: strict, and with a checksum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from shardwise.errors import ShardwiseError


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
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            given = content.pop("crc32", None) if isinstance(content, dict) else None
            checksum = _checksum(content)
        except OSError as error:
            raise ShardwiseError(f"{path} cannot be read: {error.strerror}") from None
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
