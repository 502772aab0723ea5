"""Protocol buffers' wire format: the fields of a message as bytes, without a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwise.errors import ShardwiseError

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
MAX_VARINT = 10  # bytes
FLOAT, DOUBLE = np.dtype("<f4"), np.dtype("<f8")


class WireMessage:
    """A message in a buffer; whatever its bytes claim is looked at before it is believed."""

    def __init__(self, data: memoryview, file: str) -> None:
        self.data, self.file = data, file

    def fields(self) -> Iterator[tuple[int, Any]]:
        """Numbers of fields with their values: whole numbers, or bytes."""
        at = 0
        while at < len(self.data):
            key, at = self._varint(at)
            if key & 7 == VARINT:
                value, at = self._varint(at)
                yield key >> 3, value
                continue
            if key & 7 == BYTES:
                length, at = self._varint(at)
            elif key & 7 in (EIGHT_BYTES, FOUR_BYTES):
                length = 8 if key & 7 == EIGHT_BYTES else 4
            else:
                raise self.damaged()
            if length > len(self.data) - at or key >> 3 == 0:
                raise self.damaged()
            yield key >> 3, self.data[at : at + length]
            at += length

    def within(self, value: Any) -> WireMessage:
        """The message that a field holds."""
        return WireMessage(self.bytes(value), self.file)

    def bytes(self, value: Any) -> memoryview:
        if not isinstance(value, memoryview):
            raise self.damaged()
        return value

    def text(self, value: Any) -> str:
        return self.bytes(value).tobytes().decode(errors="replace")

    def floats(self, values: list[Any], kind: np.dtype) -> np.ndarray:
        """The numbers of a repeated field, packed or one by one."""
        parts = [self.bytes(value) for value in values]
        if any(len(part) % kind.itemsize for part in parts):
            raise self.damaged()
        if len(parts) == 1:
            return np.frombuffer(parts[0], kind)
        return np.frombuffer(b"".join(parts), kind)

    def integers(self, values: list[Any]) -> list[int]:
        found: list[int] = []
        for value in values:
            if isinstance(value, int):
                found.append(value)
                continue
            packed, at = WireMessage(value, self.file), 0
            while at < len(value):
                number, at = packed._varint(at)
                found.append(number)
        return found

    def _varint(self, at: int) -> tuple[int, int]:
        value = 0
        for place, byte in enumerate(self.data[at : at + MAX_VARINT]):
            value |= (byte & 127) << 7 * place
            if byte < 128:
                return value, at + place + 1
        raise self.damaged()

    def damaged(self) -> ShardwiseError:
        return ShardwiseError(f"{self.file!r} is damaged or cut short, or no file of Caffe's")
