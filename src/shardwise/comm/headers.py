"""What precedes every message, so that ranks that do not do the same thing are told so at once.

Sender and receiver each make the header that a message should have, and both must be equal byte by
byte. What torch carries has a tag made of its header, so that messages that differ never meet.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from zlib import crc32

from shardwise.errors import ShardwiseError

SIZE = 160  # bytes of every header
MARK = b"SW"
_START = struct.Struct("<2s?xIIQ")  # mark, whether it follows, lane, number, bytes
_CHECKSUM = struct.Struct("<I")
_ROOM = SIZE - _START.size - _CHECKSUM.size  # for text


class Mismatch(ShardwiseError):
    """A message that is not the one its receiver awaits."""


@lru_cache(maxsize=4096)
def purpose(dtype: str, action: str, phase: str, name: str) -> bytes:
    """The text of a header: cut to fit, with a checksum of the whole."""
    text = "\n".join((dtype, action, phase, name)).encode()
    return _CHECKSUM.pack(crc32(text)) + text[:_ROOM].ljust(_ROOM, b"\0")


@lru_cache(maxsize=256)
def lane_number(lane: str) -> int:
    """Zero for messages outside lanes."""
    return crc32(lane.encode()) if lane else 0


def header(follows: bool, lane: int, number: int, nbytes: int, text: bytes) -> bytes:
    """Of the number-th message of a lane, which comes right after this, or torch carries it."""
    return _START.pack(MARK, follows, lane, number, nbytes) + text


def follows(said: bytes) -> bool:
    """Whether the message comes right after this header."""
    return _START.unpack_from(said)[1]


def lane_of(said: bytes) -> int:
    return _START.unpack_from(said)[2]


def tag_of(said: bytes) -> int:
    """A number for torch to tell messages apart by."""
    return crc32(said) & 0x7FFFFFFF


def mismatch(sender: int, said: bytes, receiver: int, awaited: bytes) -> Mismatch:
    """One sentence about a message that is another one than awaited."""
    (phase, name), (own, waiting) = _place(said), _place(awaited)
    if phase and own and phase != own:
        return Mismatch(
            f"rank {sender} is in {phase} ({name!r}), and rank {receiver} in {own} ({waiting!r}); "
            "all ranks must do the same thing"
        )
    sent, wanted = _described(said), _described(awaited)
    if sent == wanted:
        sent += f" as message {_START.unpack_from(said)[3]}"
        wanted += f" as message {_START.unpack_from(awaited)[3]}"
    return Mismatch(
        f"rank {sender} sent {sent} where rank {receiver} awaits {wanted}; the ranks do not do "
        "the same thing"
    )


def _text(said: bytes) -> list[str]:
    text = said[_START.size + _CHECKSUM.size :].rstrip(b"\0").decode(errors="ignore")
    return [*text.split("\n", 3), "", "", ""][:4]


def _place(said: bytes) -> tuple[str, str]:
    """What its sender is doing, and with what."""
    _, _, phase, name = _text(said) if said[: len(MARK)] == MARK else [""] * 4
    return phase, name


def _described(said: bytes) -> str:
    if said[: len(MARK)] != MARK:
        return "bytes that are no message"
    dtype, action, phase, name = _text(said)
    size = f"{_START.unpack_from(said)[4]:,} bytes of {dtype} for " if dtype else ""
    return f"{size}{name!r} ({action}{f' in {phase}' if phase else ''})"
