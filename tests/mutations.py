"""Mutations of files, for fuzzing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

Mutation = Callable[[bytes, np.random.Generator], bytes]


def _flip_a_bit(content: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(content)
    changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _overwrite(content: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(content)))
    return content[:start] + rng.bytes(int(rng.integers(1, 20))) + content[start + 20 :]


def _zeros(content: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(content)))
    middle = content[start : start + 64]
    return content[:start] + bytes(len(middle)) + content[start + 64 :]


def _cut(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: int(rng.integers(len(content)))]


def _grow(content: bytes, rng: np.random.Generator) -> bytes:
    return content + rng.bytes(int(rng.integers(1, 50)))


def _rotate(content: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(1, max(2, len(content))))
    return content[start:] + content[:start]


def _digit(content: bytes, rng: np.random.Generator) -> bytes:
    """Another digit: what a mutation of a header most often has to be to be read at all."""
    places = [place for place, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return _flip_a_bit(content, rng)
    changed = bytearray(content)
    changed[places[rng.integers(len(places))]] = 48 + int(rng.integers(10))
    return bytes(changed)


def _text(content: bytes, rng: np.random.Generator) -> bytes:
    return [b"", b"{}", b"[" * 5000, b"null", b'{"format": "shardwise store"}'][rng.integers(5)]


MUTATIONS: list[Mutation] = [
    _flip_a_bit, _flip_a_bit, _overwrite, _zeros, _cut, _grow, _rotate, _digit, _digit, _text,
]  # fmt: skip


def mutate(folder: Path, rng: np.random.Generator) -> str:
    """Changes one file, or removes it; says which and how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[rng.integers(len(files))]
    if rng.random() < 0.04:
        path.unlink()
        return f"{path.name} removed"
    mutation = MUTATIONS[rng.integers(len(MUTATIONS))]
    content = path.read_bytes()
    path.write_bytes(mutation(content, rng) if content else b"x")
    return f"{path.name} {mutation.__name__}"
