"""Curves for TensorBoard, in the form of its event files.

A file is a row of records: length, masked CRC-32C of the length, an Event message of protocol
buffers, and its masked CRC-32C.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from functools import cache
from pathlib import Path

DOUBLE, VARINT, BYTES, FLOAT = 1, 0, 2, 5  # how protocol buffers write a field
START = 1  # the status of a session that begins: what was said of later steps is void


class Board:
    """An event file; what is written is there for TensorBoard at once."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(_field(3, BYTES, b"brain.Event:2"))
        self._write(_varint(2, step) + _field(7, BYTES, _varint(1, START)))

    def add(self, step: int, values: dict[str, float]) -> None:
        """A point of each of these curves."""
        summary = b"".join(
            _field(1, BYTES, _field(1, BYTES, name.encode()) + _field(2, FLOAT, value))
            for name, value in values.items()
        )
        self._write(_varint(2, step) + _field(5, BYTES, summary))

    def _write(self, event: bytes) -> None:
        message = _field(1, DOUBLE, time.time()) + event
        length = struct.pack("<Q", len(message))
        self._file.write(length + _checksum(length) + message + _checksum(message))

    def close(self) -> None:
        self._file.close()


def _field(number: int, kind: int, value: bytes | float) -> bytes:
    """One field of a message."""
    if isinstance(value, bytes):
        return bytes([number << 3 | kind]) + _whole(len(value)) + value
    return bytes([number << 3 | kind]) + struct.pack("<d" if kind == DOUBLE else "<f", value)


def _varint(number: int, value: int) -> bytes:
    return bytes([number << 3 | VARINT]) + _whole(value)


def _whole(value: int) -> bytes:
    """A whole number in groups of seven bits, the lowest first."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _table()[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked)


@cache
def _table() -> list[int]:
    """Of CRC-32C, Castagnoli's polynomial, bits reversed."""
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        found.append(byte)
    return found
